// On top of the AVX2 table. Needs AVX-512 F, BW, VL and DQ.
#include "functions.h"

namespace kvarn::avx512 {

void improve(KernelTable& t) noexcept {
    t.name = "avx512";
    t.quantize_row = quantize_row;
    t.rms_norm = rms_norm;
    t.add = add;
    t.silu_mul = silu_mul;
    t.gelu_tanh_mul = gelu_tanh_mul;
    t.attend_f16 = attend_f16;
    t.attend_f32 = attend_f32;
    t.attend_q8_0 = attend_q8_0;
}

}  // namespace kvarn::avx512
