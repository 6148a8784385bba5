// Attention over one tile of keys.
#include "../shared/attention.h"

#include "lanes.h"

namespace kvarn::neon {
constinit const KernelTable attention_kernels = shared::attention_kernels<Lanes>();
}  // namespace kvarn::neon
