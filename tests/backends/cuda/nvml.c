/* A library under NVML's name with four GPUs in two pairs, for NVIDIA's own Python binding. FAKE_* variables change it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;

static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static int at(void *handle) { return (int)(size_t)handle - 1; }

int nvmlInit_v2(void) { return number("FAKE_INIT", 0); }
int nvmlInitWithFlags(unsigned flags) { return number("FAKE_INIT", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "error"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = number("FAKE_COUNT", 4); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { *handle = (void *)(size_t)(i + 1); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "580.65.06"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = number("FAKE_CUDA", 13000); return 0; }
int nvmlSystemGetCudaDriverVersion(int *v) { return nvmlSystemGetCudaDriverVersion_v2(v); }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetName(void *h, char *text, unsigned n) { snprintf(text, n, "NVIDIA H100 80GB HBM3"); return 0; }
int nvmlDeviceGetUUID(void *h, char *text, unsigned n) { snprintf(text, n, "GPU-0000000%d-test", at(h)); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { m->total = 80ull << 30; m->used = 10ull << 30; m->free = m->total - m->used; return 0; }
int nvmlDeviceGetPciInfo_v3(void *h, pci_t *p) { memset(p, 0, sizeof *p); snprintf(p->bus_id, 32, "00000000:%02X:00.0", 0xA0 + at(h)); return 0; }
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) { *level = at(a) / 2 == at(b) / 2 ? 10 : 50; return 0; }
int nvmlDeviceGetNvLinkState(void *h, unsigned link, int *state) { *state = link < 4; return link < 6 ? 0 : 2; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, pci_t *p) { return nvmlDeviceGetPciInfo_v3((void *)(size_t)((at(h) ^ 1) + 1), p); }
int nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *status) { *status = at(a) / 2 == at(b) / 2 ? 0 : 4; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_t *p) {
  unsigned room = *n, there = at(h) == 0;
  *n = there;
  if (!there) return 0;
  if (room < 1) return 7;
  p[0].pid = 4242; p[0].used = 9ull << 30;
  return 0;
}
