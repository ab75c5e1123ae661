/* A library under NVML's name with four GPUs in two pairs, for NVIDIA's own Python binding. FAKE_* variables change it;
   built with -DOLD it lacks the functions that old drivers lack. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
enum { UNSUPPORTED = 3, ABSENT = 6, SMALL = 7, SLICE = 100 };

static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static int at(void *handle) { return (int)(size_t)handle - 1; }
static void *handle(int i) { return (void *)(size_t)(i + 1); }
static unsigned long long gib(int n) { return (unsigned long long)n << 30; }

int nvmlInit_v2(void) { return number("FAKE_INIT", 0); }
int nvmlInitWithFlags(unsigned flags) { return number("FAKE_INIT", 0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) {
  return code == 4 ? "Insufficient Permissions" : code == 9 ? "Driver Not Loaded" : code == 18 ? "Driver/library version mismatch" : "error";
}
int nvmlDeviceGetCount_v2(unsigned *n) { *n = number("FAKE_COUNT", 4); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = handle(i); return (int)i == number("FAKE_LOST", -1) ? 15 : 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **h) { *h = handle(uuid[11] - '0'); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "580.65.06"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = number("FAKE_CUDA", 13000); return 0; }
int nvmlSystemGetCudaDriverVersion(int *v) { return nvmlSystemGetCudaDriverVersion_v2(v); }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
  int tens = at(h) == 0 ? number("FAKE_FIRST", number("FAKE_CAPABILITY", 90)) : number("FAKE_CAPABILITY", 90);
  *major = tens / 10; *minor = tens % 10;
  return number("FAKE_RAISES", 0);
}
int nvmlDeviceGetName(void *h, char *text, unsigned n) { snprintf(text, n, at(h) < SLICE ? "NVIDIA H100 80GB HBM3" : "NVIDIA H100 MIG 1g.10gb"); return 0; }
int nvmlDeviceGetUUID(void *h, char *text, unsigned n) {
  if (at(h) < SLICE) snprintf(text, n, "GPU-0000000%d-test", at(h)); else snprintf(text, n, "MIG-0000000%d-test", at(h) - SLICE);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) {
  int total = at(h) < SLICE ? number("FAKE_TOTAL", 80) : 10;
  m->total = gib(total); m->used = gib(total ? number("FAKE_USED", 10) : 0); m->free = m->total - m->used;
  return number("FAKE_RAISES", 0);
}
int nvmlDeviceGetPciInfo_v3(void *h, pci_t *p) { memset(p, 0, sizeof *p); snprintf(p->bus_id, 32, "00000000:%02X:00.0", 0xA0 + at(h)); return number("FAKE_RAISES", 0); }
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) { *level = at(a) / 2 == at(b) / 2 ? 10 : 50; return 0; }
int nvmlDeviceGetNvLinkState(void *h, unsigned link, int *state) { *state = link < 4; return link < 6 ? 0 : 2; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, int *kind) { *kind = number("FAKE_FAR_END", 0); return 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, pci_t *p) {
  memset(p, 0, sizeof *p); snprintf(p->bus_id, 32, "0000:%02X:00.0", 0xA0 + (at(h) ^ 1)); /* four digits of domain */
  return number("FAKE_RAISES", 0);
}
int nvmlDeviceGetP2PStatus(void *a, void *b, int index, int *status) { *status = at(a) / 2 == at(b) / 2 ? 0 : 4; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) { *now = *later = at(h) == number("FAKE_MIG", -1); return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned place, void **part) { *part = handle(SLICE + place); return place < 2 ? 0 : ABSENT; }

static int running(void *h, unsigned *n, process_t *p, int pid, unsigned long long used) {
  unsigned room = *n, there = at(h) == 0;
  *n = there;
  if (!there) return 0;
  if (room < 1) return SMALL;
  p[0].pid = pid; p[0].used = used;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *h, unsigned *n, process_t *p) { return running(h, n, p, 4242, gib(9)); }
#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_t *p) { return running(h, n, p, 4242, gib(9)); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, process_t *p) {
  if (number("FAKE_SCREEN", 0)) return running(h, n, p, 77, ~0ull); /* a size that the driver does not tell */
  *n = 0;
  return 0;
}
#endif
