// Attention over one tile of keys, 16 keys or 16 dimensions to a vector.
#include "../shared/attention.h"

#include "lanes.h"

namespace kvarn::avx512 {
constinit const KernelTable attention_kernels = shared::attention_kernels<Lanes>();
}  // namespace kvarn::avx512
