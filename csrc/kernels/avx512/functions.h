// What this folder puts into the table.
#pragma once
#include "../table.h"

namespace kvarn::avx512 {

void attend_f16(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                float softcap, float* m, float* l, float* acc, float* scratch) noexcept;
void attend_f32(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                float softcap, float* m, float* l, float* acc, float* scratch) noexcept;
void attend_q8_0(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                 float softcap, float* m, float* l, float* acc, float* scratch) noexcept;

}  // namespace kvarn::avx512
