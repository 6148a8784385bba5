// The whole contract between the model code and the kernels of one instruction set.
//
// Kernels are noexcept, take caller-owned buffers, allocate nothing and start no threads. For one table the
// result of every output is bitwise independent of how many rows share the call and of how rows are grouped.
// Across tables results agree within the tolerance family named at each entry:
//   exact    bit for bit
//   f32      |a - b| <= 2e-6 * (sum of magnitudes of the terms) : another order of float additions
//   exp      4 units in the last place of a correctly rounded exp per term, then as f32
//
// This header is included by ISA folders, which may include nothing else but intrinsics, <cstdint>, <cstddef>.
#pragma once
#include <cstddef>
#include <cstdint>

#include "packed.h"

namespace kvarn {

// Same numbers as ggml's type ids, so that a file's id needs no translation.
enum class Type : int32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    BF16 = 30,
};
constexpr int kNumTypes = 31;

// Every type by name, for lists of kernels: X(Q4_0) and so on.
#define KVARN_FLOAT_TYPES(X) X(F32) X(F16) X(BF16)
#define KVARN_QUANTIZED_TYPES(X) \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL)

constexpr int kLanes = 8;            // rows of a packed weight group
constexpr int kQuantBlock = 32;      // activations per quantisation block
constexpr int kTileTokens = 32;      // activation rows per packed tile, at most
constexpr int kRoundedTokens = 512;  // rows of an ActTile that are rounded, at most
constexpr int kKeyTile = 64;         // keys per attention tile; tiles start at multiples of it
constexpr int kKVBlock = 16;         // tokens per KV block

// Activations of up to kTileTokens rows, quantised to int8 in blocks of 32, block-major so that one unpacked
// weight block meets all rows of the tile:
//   q     [k / 32][n][32] int8
//   scale [k / 32][n]     float, q * scale ~ x
//   sum   [k / 32][n]     float, scale * (sum of the 32 q)
//   minus_sums [k / 32][n][2] int32, minus the sums of the first and of the last 16 q
// f is the same tile unquantised, [n][k] float, for the float weight types.
//
// Where the table has round_row its products take rounded rows instead, and up to kRoundedTokens of them at a time:
//   rounded   tiles of kTileTokens rows and one of what is left, each [k / 32][rows of the tile][32] bf16, of a
//             block the even columns first
struct ActTile {
    const int8_t* q;
    const float* scale;
    const float* sum;
    const int32_t* minus_sums;
    const float* f;
    int n;  // rows in the tile, 1 .. kTileTokens or kRoundedTokens
    int k;  // columns; a multiple of 32 when the weights are quantised
    const uint16_t* rounded = nullptr;
};

// One KV tile of one layer and one KV head: up to kKeyTile / kKVBlock block pointers.
//   K of a block: [head_dim][16] (a column per token);  V of a block: [16][head_dim]
// q8_0: the same as int8, behind it f16 scales, one for each token and 32 dimensions (the last group may be shorter):
//   K: [head_dim][16] int8, [groups][16] f16;  V: [16][head_dim] int8, [16][groups] f16;  groups = ceil(head_dim / 32)
struct KVTile {
    const void* k[kKeyTile / kKVBlock];
    const void* v[kKeyTile / kKVBlock];
    int num_keys;  // valid keys in the tile, 1 .. kKeyTile
};

// matmul: for the row groups [group_begin, group_end) of a packed matrix (8 output rows each, `k` columns)
//   out[t * out_stride + 8 * g + lane] = sum over k of W[8 g + lane][k] * x[t][k]        (t < tile.n)
// Blocks of k are added in ascending order with one float fma each, for every n and every grouping.
// A table with round_row rounds weights of quantised types to bf16, too, and adds in the order of adr/0043 instead.
// The last group of a matrix may be padding; `rows` is the true number of rows and nothing beyond is written.
// tolerance: f32
using MatmulFn = void (*)(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows,
                          int group_begin, int group_end) noexcept;

// Attention of one query row's `num_heads` heads of one KV head over one tile of keys.
//   q     [num_heads][head_dim] float, not yet scaled
//   keys [first, last) of the tile are visible, 0 <= first < last <= num_keys
//   m, l  [num_heads]            running maximum of the scores and sum of exp(score - m); start -inf, 0
//   acc   [num_heads][head_dim]  running sum of exp(score - m) * V; start 0
//   bias  [num_heads][kKeyTile]  added to the scores; null: none
// scores = scale * (q . k), then softcap * tanh(scores / softcap) if softcap > 0, then + bias. The tile is reduced on
// its own and then merged into (m, l, acc), so tiles give the same bits in whichever call they are merged,
// as long as they come left to right. tolerance: exp. scratch: num_heads * kKeyTile floats.
using AttendFn = void (*)(const float* q, int num_heads, int head_dim, const KVTile& tile, int first, int last,
                          float scale, float softcap, const float* bias, float* m, float* l, float* acc,
                          float* scratch) noexcept;

// Store K and V of one token (one head) at slot 0..15 of a block; no other slot is touched. tolerance: exact
using StoreKVFn = void (*)(const float* k, const float* v, int head_dim, int slot, void* k_block,
                           void* v_block) noexcept;

// The two products of a low-rank pair, both packed as a matrix is. In: `rank` sums of one row x,
//   low[j] = scale * sum over c of A[j][c] * x[c]    columns c of equal c % 4 in ascending order, one fma each,
//                                                    then (sum 0 + sum 1) + (sum 2 + sum 3)
// low has room for whole groups of 8. Add, for the first `rows` rows of B:
//   out[row] += sum over j < rank of B[row][j] * low[j], in ascending order, one fma each from 0
// tolerance: f32
using LowRankInFn = void (*)(const uint8_t* packed, const float* x, int columns, int rank, float scale,
                             float* low) noexcept;
using LowRankAddFn = void (*)(const uint8_t* packed, const float* low, int rank, int rows, float* out) noexcept;

struct KernelTable {
    const char* name;

    MatmulFn matmul[kNumTypes];  // by Type; null where a type has none

    // Quantise one row of k floats (k % 32 == 0) into row t of a tile of n rows. With s = level / absmax, q = x * s
    // rounded to nearest even and scale = absmax / level, for the level of 127, 126, 125, 124 that leaves the least
    // scale^2 * sum((x * s - q)^2), the first of equals; the sum runs over i mod 8, then by halves. A block whose
    // absmax is below 1e-36 counts as zeros and gets scale 0; one with NaN or infinity gets q = 0 and scale NaN.
    // tolerance: exact
    void (*quantize_row)(const float* x, int k, int t, int n, int8_t* q, float* scale, float* sum,
                         int32_t* minus_sums) noexcept;

    // Round one row of k floats (k % 32 == 0) into row t of a tile of n rows: to bf16, to nearest even, subnormals to
    // zero. Null: products of quantised types take quantised rows. tolerance: exact
    void (*round_row)(const float* x, int k, int t, int n, uint16_t* rounded) noexcept;

    // y = x / sqrt(mean(x^2) + eps) * w. tolerance: f32. y may be x.
    void (*rms_norm)(const float* x, const float* w, float eps, int n, float* y) noexcept;

    // y = (x - mean) / sqrt(var + eps) * w + b. tolerance: f32. y may be x.
    void (*layer_norm)(const float* x, const float* w, const float* b, float eps, int n, float* y) noexcept;

    // y[i] += x[i]; tolerance: exact
    void (*add)(const float* x, int n, float* y) noexcept;

    // y[i] = act(gate[i]) * up[i]; tolerance: exp. y may be gate.
    void (*silu_mul)(const float* gate, const float* up, int n, float* y) noexcept;
    void (*gelu_tanh_mul)(const float* gate, const float* up, int n, float* y) noexcept;

    // y[i] = sigmoid(gate[i]) * x[i]; tolerance: exp. y may be x.
    void (*sigmoid_mul)(const float* gate, const float* x, int n, float* y) noexcept;

    // y[c] = sum over i of rows[i][c] * w[i * n + c], in ascending i, plus bias[c] (null: none), then silu of it if
    // wanted. tolerance: exp
    void (*convolve)(const float* const* rows, const float* w, const float* bias, int kernel, int n, bool silu,
                     float* y) noexcept;

    // One token of one head of a gated delta net, S and next (key_dim, value_dim), next may be S:
    //   next = decay * S + k (v - decay * k S) * beta,  out = q next; sums over the keys in ascending order, one fma
    //   each
    // tolerance: f32
    void (*delta_step)(const float* S, const float* q, const float* k, const float* v, float decay, float beta,
                       int key_dim, int value_dim, float* next, float* out) noexcept;

    // One token of one head of a state space, S and next (key_dim, value_dim), next may be S:
    //   next = decay * S + k (v * step),  out = q next; sums over the keys in ascending order, one fma each
    // tolerance: f32
    void (*state_step)(const float* S, const float* q, const float* k, const float* v, float decay, float step,
                       int key_dim, int value_dim, float* next, float* out) noexcept;

    // The same where every value of the state has a decay of its own and every column a step of its own:
    //   next = exp(a * steps) * S + k (v * steps),  out = q next; a (key_dim, value_dim), steps (value_dim)
    // tolerance: exp
    void (*selective_step)(const float* S, const float* a, const float* q, const float* k, const float* v,
                           const float* steps, int key_dim, int value_dim, float* next, float* out) noexcept;

    // y[i] = exact (erf) gelu(x[i]); tolerance: exp. y may be x.
    void (*gelu)(const float* x, int n, float* y) noexcept;

    // By type of the pair.
    LowRankInFn low_rank_in_f16, low_rank_in_f32;
    LowRankAddFn low_rank_add_f16, low_rank_add_f32;

    // By type of the cache. q8_0 has the bits of attend_f32 over its dequantised values, which are exact floats.
    AttendFn attend_f16;
    AttendFn attend_f32;
    AttendFn attend_q8_0;

    // f16: round to nearest even. q8_0, for each group of 32: scale = f16(absmax / 127), q = x * (1 / scale) rounded to
    // nearest even and held to -127 .. 127; scale 0: q = 0; NaN, infinity or a scale beyond f16: q = 0, scale NaN.
    StoreKVFn store_kv_f16;
    StoreKVFn store_kv_f32;
    StoreKVFn store_kv_q8_0;

    // Largest value and its lowest index. tolerance: exact
    void (*argmax)(const float* x, int n, int* index, float* value) noexcept;

    // Sum of exp(x[i] - max) in double, in eight interleaved partial sums added in order. tolerance: exp
    double (*sum_exp)(const float* x, int n, float max) noexcept;

    // sums[0] = sum_exp, sums[1] = sum of exp(x[i] - max) * (x[i] - max), both in that way: log-probability and entropy
    // in one pass. A product whose exp is 0 counts as 0. tolerance: exp
    void (*softmax_sums)(const float* x, int n, float max, double* sums) noexcept;
};

// Each folder fills in parts of a table, at compile time: no code of a set runs before it is chosen. An entry that is
// null in all parts of a set is its parent's; select.cpp says which set is built on which.
namespace scalar { extern const KernelTable vector_kernels, attention_kernels, store_kernels, matmul_kernels; }
namespace avx2 {
extern const KernelTable vector_kernels, attention_kernels, store_kernels, matmul_kernels, matmul_float_kernels;
}
namespace avx512 { extern const KernelTable vector_kernels, attention_kernels; }
namespace avx512_vnni { extern const KernelTable matmul_kernels; }
namespace avx512_amx { extern const KernelTable matmul_kernels; }
namespace avx512_amx_emulated { extern const KernelTable matmul_kernels; }
namespace neon {
extern const KernelTable vector_kernels, attention_kernels, store_kernels, matmul_kernels, matmul_float_kernels;
}
namespace neon_dot { extern const KernelTable matmul_kernels; }
namespace neon_i8mm { extern const KernelTable matmul_kernels; }  // namespace neon_i8mm

const KernelTable& select_table(const char* name);  // "" = the best this CPU has; throws on an unknown or missing one

}  // namespace kvarn
