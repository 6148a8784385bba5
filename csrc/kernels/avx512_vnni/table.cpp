// On top of the AVX-512 table: integer products. Needs AVX-512 F, BW, VL, DQ and VNNI.
#include "functions.h"

namespace kvarn::avx512_vnni {

void improve(KernelTable& t) noexcept {
    t.name = "avx512_vnni";
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
}

}  // namespace kvarn::avx512_vnni
