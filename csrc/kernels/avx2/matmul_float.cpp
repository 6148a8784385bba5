// Matrix times activations for weights kept as floats.
#include "../shared/matmul_float.h"

#include "lanes.h"

namespace kvarn::avx2 {
constinit const KernelTable matmul_float_kernels = shared::matmul_float_kernels<Lanes>();
}  // namespace kvarn::avx2
