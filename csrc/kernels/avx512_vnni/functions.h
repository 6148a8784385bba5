// What this folder puts into the table.
#pragma once
#include "../table.h"

namespace kvarn::avx512_vnni {

void matmul_q4_0(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q4_1(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q5_0(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q5_1(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q8_0(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q2_k(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q3_k(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q4_k(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q5_k(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_q6_k(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_iq4_nl(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;

}  // namespace kvarn::avx512_vnni
