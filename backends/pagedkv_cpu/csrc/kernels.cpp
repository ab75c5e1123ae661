// All kernels for one instruction set; compiled once for each, with PKV_ISA as its name.
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "plain.h"
#include "table.h"

namespace PKV_ISA {

extern const pkv_table table;
const pkv_table table = {attend_work, attend, append, linear, pack, rows, add_rms_norm, rope, gated};

}  // namespace PKV_ISA
