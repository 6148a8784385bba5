// On top of the AVX-512 VNNI table: products of many tokens. Needs AMX tile and int8, allowed by the system.
#include "functions.h"

namespace kvarn::amx {
namespace {

MatmulFn parents[kNumTypes];  // written once, before the table is used

void replace(KernelTable& t, Type type, MatmulFn own) noexcept {
    MatmulFn& entry = t.matmul[static_cast<int>(type)];
    parents[static_cast<int>(type)] = entry;
    entry = own;
}

}  // namespace

MatmulFn parent_matmul(Type type) noexcept { return parents[static_cast<int>(type)]; }

void improve(KernelTable& t) noexcept {
    t.name = "amx";
    replace(t, Type::Q4_0, matmul_q4_0);
    replace(t, Type::Q4_1, matmul_q4_1);
    replace(t, Type::Q5_0, matmul_q5_0);
    replace(t, Type::Q5_1, matmul_q5_1);
    replace(t, Type::Q8_0, matmul_q8_0);
    replace(t, Type::Q2_K, matmul_q2_k);
    replace(t, Type::Q3_K, matmul_q3_k);
    replace(t, Type::Q4_K, matmul_q4_k);
    replace(t, Type::Q5_K, matmul_q5_k);
    replace(t, Type::Q6_K, matmul_q6_k);
    replace(t, Type::IQ4_NL, matmul_iq4_nl);
}

}  // namespace kvarn::amx
