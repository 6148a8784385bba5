// On top of the NEON table: integer products with sdot. Needs the dot product extension (ARMv8.2).
#include "dots.h"

namespace kvarn::neon_dot {

void improve(KernelTable& t) noexcept {
    t.name = "neon_dot";
    neon::set_products<QuadDots>(t);
}

}  // namespace kvarn::neon_dot
