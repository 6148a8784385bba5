// What this folder puts into the table.
#pragma once
#include "../table.h"

namespace kvarn::avx512 {

void quantize_row(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum,
                  int32_t* minus_sums) noexcept;
void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept;
void add(const float* x, int n, float* y) noexcept;
void silu_mul(const float* gate, const float* up, int n, float* y) noexcept;
void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) noexcept;
void attend_f16(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                float softcap, float* m, float* l, float* acc, float* scratch) noexcept;
void attend_f32(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                float softcap, float* m, float* l, float* acc, float* scratch) noexcept;
void attend_q8_0(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                 float softcap, float* m, float* l, float* acc, float* scratch) noexcept;

}  // namespace kvarn::avx512
