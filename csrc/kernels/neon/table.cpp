// On top of the scalar table: ARMv8.0 with Advanced SIMD, which every AArch64 server, phone and laptop has.
#include "functions.h"

namespace kvarn::neon {

void improve(KernelTable& t) noexcept {
    t.name = "neon";
    t.matmul[static_cast<int>(Type::F32)] = matmul_f32;
    t.matmul[static_cast<int>(Type::F16)] = matmul_f16;
    t.matmul[static_cast<int>(Type::BF16)] = matmul_bf16;
    set_quantized_products(t);
    t.quantize_row = quantize_row;
    t.rms_norm = rms_norm;
    t.layer_norm = layer_norm;
    t.add = add;
    t.silu_mul = silu_mul;
    t.gelu_tanh_mul = gelu_tanh_mul;
    t.gelu = gelu;
    t.attend_f16 = attend_f16;
    t.attend_f32 = attend_f32;
    t.attend_q8_0 = attend_q8_0;
    t.store_kv_f16 = store_kv_f16;
    t.store_kv_q8_0 = store_kv_q8_0;
    t.argmax = argmax;
    t.sum_exp = sum_exp;
    t.softmax_sums = softmax_sums;
}

}  // namespace kvarn::neon
