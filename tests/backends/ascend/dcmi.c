/* A library under the name of the driver's, with two cards of one NPU each, numbered the other way round than the cards.
   FAKE_* variables change it; built with -DOLD it lacks what drivers before 24.1 lack, with -DEMPTY everything. */
#ifndef EMPTY
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NOT_EXIST = -8008, UNSUPPORTED = -8255 };
typedef struct { unsigned char type[32], name[32], version[32]; unsigned cores; } chip_t;
typedef struct { chip_t chip; unsigned char npu_name[32]; } chip_v2_t;
typedef struct { unsigned long long size; unsigned frequency; unsigned long long usage; int temperature; unsigned bandwidth; } hbm_t;

static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static const char *text(const char *name, const char *otherwise) { const char *v = getenv(name); return v ? v : otherwise; }
static int lost(const char *call, int card) { return card == number("FAKE_LOST", -1) && !strcmp(call, text("FAKE_LOST_AT", "")) ? NOT_EXIST : 0; }

int dcmi_init(void) { return number("FAKE_INIT", 0); }
static int list(int *count, int *cards, int room) {
  *count = number("FAKE_CARDS", 2);
  for (int i = 0; i < *count && i < room; i++) cards[i] = 10 + i;
  return 0;
}
int dcmi_get_card_num_list(int *count, int *cards, int room) { return list(count, cards, room); }
int dcmi_get_device_num_in_card(int card, int *count) { *count = number("FAKE_DEVICES", 1); return lost("num", card); }
int dcmi_get_device_logic_id(int *id, int card, int device) {
  int count = number("FAKE_CARDS", 2), devices = number("FAKE_DEVICES", 1);
  *id = number("FAKE_ID", (count - 1 - (card - 10)) * devices + device);
  return lost("id", card);
}
static int chip(chip_t *found, int card) {
  memset(found, 0, sizeof *found);
  snprintf((char *)found->type, 32, "Ascend");
  snprintf((char *)found->name, 32, "%s", text("FAKE_CHIP", "910B3"));
  found->cores = 20;
  return lost("chip", card);
}
int dcmi_get_device_chip_info(int card, int device, chip_t *found) { return chip(found, card); }
int dcmi_get_device_hbm_info(int card, int device, hbm_t *found) {
  found->size = number("FAKE_SIZE", 65536); found->usage = number("FAKE_USED", 4096);
  found->frequency = found->bandwidth = ~0u; found->temperature = -1;
  return number("FAKE_MEMORY", 0);
}
#ifndef OLD
int dcmi_get_card_list(int *count, int *cards, int room) { return list(count, cards, room); }
int dcmi_get_device_chip_info_v2(int card, int device, chip_v2_t *found) {
  memset(found, 0, sizeof *found);
  snprintf((char *)found->npu_name, 32, "%s", text("FAKE_NPU_NAME", ""));
  return getenv("FAKE_NO_V2") ? UNSUPPORTED : chip(&found->chip, card);
}
#endif
#endif
