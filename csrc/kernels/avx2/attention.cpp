// Attention over one tile of keys, 8 keys or 8 dimensions to a vector.
#include "../shared/attention.h"

#include "lanes.h"

namespace kvarn::avx2 {
constinit const KernelTable attention_kernels = shared::attention_kernels<Lanes>();
}  // namespace kvarn::avx2
