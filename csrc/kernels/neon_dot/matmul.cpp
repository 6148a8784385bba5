// On top of the NEON table: integer products with sdot. Needs the dot product extension (ARMv8.2).
#include "dots.h"

namespace kvarn::neon_dot {
constinit const KernelTable matmul_kernels = neon::make_matmul_kernels<QuadDots>();
}  // namespace kvarn::neon_dot
