// Runs every kernel on every instruction set that this processor has.
//
//     kernels [--few] [--only ISA] [--expect ISA]
//
// --few: a few cases of each kind. --expect: fail unless "auto" takes this one. Exit status 1 after any failure.
#include <chrono>

#include "check.h"

struct Test {
  const char* name;
  Result (*run)(const Kernels&, bool full);
};

static const Test TESTS[] = {
    {"conversion", test_conversion}, {"copy", test_copy},   {"append", test_append}, {"attention", test_attention},
    {"linear", test_linear},         {"rows", test_rows},   {"norm", test_norm},     {"rope", test_rope},
    {"gated", test_gated},           {"plain", test_plain}, {"narrow", test_narrow},
};

static void run(const Test& test, const Kernels& kernels, bool full) {
  const int before = failures;
  const auto start = std::chrono::steady_clock::now();
  const Result result = test.run(kernels, full);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  CHECK(result.cases > 0, "%s ran no case", test.name);
  printf("%-12s %-11s %5d cases %6.1f s  largest error %3.0f %% of the allowed  %s\n", kernels.isa(), test.name,
         result.cases, seconds.count(), 100 * result.worst, failures == before ? "ok" : "FAILED");
  fflush(stdout);
}

static void interface(const char* expected) {
  CHECK(pkv_version() == PKV_VERSION, "version %d", pkv_version());
  CHECK(pkv_open("none", 1) == nullptr, "an unknown instruction set was opened");
  pkv_close(nullptr);
  Kernels best("auto");
  CHECK(best.here(), "auto found nothing");
  printf("auto: %s\n", best.isa());
  CHECK(!expected || !strcmp(best.isa(), expected), "auto took %s, expected %s", best.isa(), expected);
}

int main(int count, char** words) {
  bool full = true;
  const char *only = nullptr, *expected = nullptr;
  for (int i = 1; i < count; i++) {
    const std::string word = words[i];
    if (word == "--few")
      full = false;
    else if (word == "--only" && i + 1 < count)
      only = words[++i];
    else if (word == "--expect" && i + 1 < count)
      expected = words[++i];
    else
      return fprintf(stderr, "unknown: %s\n", words[i]), 2;
  }
  interface(expected);
  for (const char* isa : {"generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"}) {
    if (only && strcmp(only, isa)) continue;
    const Kernels kernels(isa);
    if (!kernels.here()) {
      printf("%-12s not verified here: this processor or this build does not have it\n", isa);
      CHECK(!only, "%s was asked for", isa);
      continue;
    }
    CHECK(!strcmp(kernels.isa(), isa), "asked for %s, got %s", isa, kernels.isa());
    for (const Test& test : TESTS) run(test, kernels, full);
  }
  printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
