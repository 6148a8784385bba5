// What this folder puts into the table beside the products of quantised types (products.h).
#pragma once
#include "../table.h"

namespace kvarn::neon {

void matmul_f32(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_f16(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void matmul_bf16(const uint8_t*, const ActTile&, float*, size_t, int, int, int) noexcept;
void set_quantized_products(KernelTable& table) noexcept;

void quantize_row(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum) noexcept;
void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept;
void layer_norm(const float* x, const float* w, const float* b, float eps, int n, float* y) noexcept;
void add(const float* x, int n, float* y) noexcept;
void silu_mul(const float* gate, const float* up, int n, float* y) noexcept;
void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) noexcept;
void gelu(const float* x, int n, float* y) noexcept;
void argmax(const float* x, int n, int* index, float* value) noexcept;
double sum_exp(const float* x, int n, float max) noexcept;
void softmax_sums(const float* x, int n, float max, double* sums) noexcept;

void attend_f16(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                float softcap, float* m, float* l, float* acc, float* scratch) noexcept;
void attend_f32(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                float softcap, float* m, float* l, float* acc, float* scratch) noexcept;
void attend_q8_0(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last, float scale,
                 float softcap, float* m, float* l, float* acc, float* scratch) noexcept;
void store_kv_f16(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept;
void store_kv_q8_0(const float* k, const float* v, int head_dim, int slot, void* k_block, void* v_block) noexcept;

}  // namespace kvarn::neon
