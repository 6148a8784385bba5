// The scalar table: runs on any CPU and defines what the other tables must agree with.
#include "functions.h"

namespace kvarn::scalar {

static constexpr KernelTable make_table() {
    KernelTable t{};
    t.name = "scalar";
    t.matmul[static_cast<int>(Type::F32)] = matmul_f32;
    t.matmul[static_cast<int>(Type::F16)] = matmul_f16;
    t.matmul[static_cast<int>(Type::BF16)] = matmul_bf16;
    t.matmul[static_cast<int>(Type::Q4_0)] = matmul_q4_0;
    t.matmul[static_cast<int>(Type::Q4_1)] = matmul_q4_1;
    t.matmul[static_cast<int>(Type::Q5_0)] = matmul_q5_0;
    t.matmul[static_cast<int>(Type::Q5_1)] = matmul_q5_1;
    t.matmul[static_cast<int>(Type::Q8_0)] = matmul_q8_0;
    t.matmul[static_cast<int>(Type::Q2_K)] = matmul_q2_k;
    t.matmul[static_cast<int>(Type::Q3_K)] = matmul_q3_k;
    t.matmul[static_cast<int>(Type::Q4_K)] = matmul_q4_k;
    t.matmul[static_cast<int>(Type::Q5_K)] = matmul_q5_k;
    t.matmul[static_cast<int>(Type::Q6_K)] = matmul_q6_k;
    t.matmul[static_cast<int>(Type::IQ4_NL)] = matmul_iq4_nl;
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
    t.store_kv_f32 = store_kv_f32;
    t.store_kv_q8_0 = store_kv_q8_0;
    t.argmax = argmax;
    t.sum_exp = sum_exp;
    t.softmax_sums = softmax_sums;
    return t;
}

constinit const KernelTable table = make_table();

}  // namespace kvarn::scalar
