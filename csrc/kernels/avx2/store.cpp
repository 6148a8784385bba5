// Storing K and V of one token in a block of the cache, rounded to the cache's type.
#include "../shared/quantize.h"
#include "lanes.h"

namespace kvarn::avx2 {
constinit const KernelTable store_kernels = shared::store_kernels<Lanes>();
}  // namespace kvarn::avx2
