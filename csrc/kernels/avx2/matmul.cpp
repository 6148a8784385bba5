// Matrix times activations. A step is 8 rows x 32 columns; its weights are unpacked once and meet every token of
// the tile, kGroups row groups and kTokens tokens at a time, so that both operands are shared in registers.
//
// Sums over the 32 columns are integers and exact; then one fma per step and token for the scale, and one for the
// minimum where a type has it, always in that order. That makes results independent of all tile sizes here.
#include "../shared/step_input.h"
#include "formats.h"
#include "prefetch.h"

namespace kvarn::avx2 {
namespace {

using shared::StepInput;

// The four activations of columns 4j .. 4j + 3, once per row.
inline __m256i broadcast4(const int8_t* q, int j) {
    int four;
    __builtin_memcpy(&four, q + 4 * j, sizeof four);
    return _mm256_set1_epi32(four);
}

inline __m256i add_pairs(__m256i i16x16) { return _mm256_madd_epi16(i16x16, _mm256_set1_epi16(1)); }

// sum += x. The empty asm keeps the compiler from regrouping a chain of integer additions into a tree, which would
// hold every product of a step at once and spill.
inline void accumulate_i16(__m256i& sum, __m256i x) {
    sum = _mm256_add_epi16(sum, x);
    __asm__("" : "+x"(sum));
}

inline void accumulate_i32(__m256i& sum, __m256i x) {
    sum = _mm256_add_epi32(sum, x);
    __asm__("" : "+x"(sum));
}

template <int kGroups, int kTokens>
using Sums = __m256[kGroups][kTokens];

// Unsigned weights with d and m. 15 * 127 * 2 * 8 fits int16; for five bits half of the columns do.
template <class Format>
struct Affine {
    using Scales = AffineScales;
    static constexpr int kMaxTokens = 4;

    template <int kGroups, int kTokens>
    static inline void add_step(const __m256i (*w)[8], const Scales* scales, const StepInput& x,
                                Sums<kGroups, kTokens>& sums) {
        constexpr int kParts = Format::kSplit ? 2 : 1;
        __m256i total[kGroups][kTokens];
        for (int part = 0; part < kParts; ++part) {
            __m256i dot[kGroups][kTokens];
#pragma GCC unroll 8
            for (int i = 0; i < 8 / kParts; ++i) {
                const int j = part * 4 + i;
                for (int t = 0; t < kTokens; ++t) {
                    const __m256i q = broadcast4(x.q + t * kQuantBlock, j);
                    for (int g = 0; g < kGroups; ++g) {
                        const __m256i product = _mm256_maddubs_epi16(w[g][j], q);
                        if (i == 0) dot[g][t] = product;
                        else accumulate_i16(dot[g][t], product);
                    }
                }
            }
            for (int g = 0; g < kGroups; ++g)
                for (int t = 0; t < kTokens; ++t) {
                    const __m256i wide = add_pairs(dot[g][t]);
                    if (part == 0) total[g][t] = wide;
                    else accumulate_i32(total[g][t], wide);
                }
        }
        for (int t = 0; t < kTokens; ++t) {
            const __m256 xd = _mm256_broadcast_ss(x.scale + t), xsum = _mm256_broadcast_ss(x.sum + t);
            for (int g = 0; g < kGroups; ++g) {
                const __m256 dot = _mm256_cvtepi32_ps(total[g][t]);
                sums[g][t] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scales[g].d, xd), sums[g][t]);
                sums[g][t] = _mm256_fmadd_ps(scales[g].m, xsum, sums[g][t]);
            }
        }
    }
};

// Signed weights: |w| times q with w's sign. 128 * 127 * 2 fits int16, a sum of two does not.
template <class Format>
struct Signed {
    using Scales = __m256;
    static constexpr int kMaxTokens = 4;

    template <int kGroups, int kTokens>
    static inline void add_step(const __m256i (*w)[8], const Scales* scales, const StepInput& x,
                                Sums<kGroups, kTokens>& sums) {
        __m256i total[kGroups][kTokens];
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            __m256i magnitude[kGroups];
            for (int g = 0; g < kGroups; ++g) magnitude[g] = _mm256_abs_epi8(w[g][j]);
            for (int t = 0; t < kTokens; ++t) {
                const __m256i q = broadcast4(x.q + t * kQuantBlock, j);
                for (int g = 0; g < kGroups; ++g) {
                    const __m256i products = _mm256_maddubs_epi16(magnitude[g], _mm256_sign_epi8(q, w[g][j]));
                    const __m256i wide = add_pairs(products);
                    if (j == 0) total[g][t] = wide;
                    else accumulate_i32(total[g][t], wide);
                }
            }
        }
        for (int t = 0; t < kTokens; ++t) {
            const __m256 xd = _mm256_broadcast_ss(x.scale + t);
            for (int g = 0; g < kGroups; ++g) {
                const __m256 dot = _mm256_cvtepi32_ps(total[g][t]);
                sums[g][t] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scales[g], xd), sums[g][t]);
            }
        }
    }
};

// factor * (sums of q over columns 4i, 4i + 1 and over 4i + 2, 4i + 3) of each half, in every int16 pair: what
// maddubs would give for weights that all equal `factor`.
inline void constant_dots(const int8_t* q, int factor, __m256i dots[2]) {
    __m256i sum = _mm256_maddubs_epi16(_mm256_set1_epi8(static_cast<char>(factor)), load32(q));
    sum = _mm256_add_epi16(sum, _mm256_shuffle_epi32(sum, 0x4e));
    sum = _mm256_add_epi16(sum, _mm256_shuffle_epi32(sum, 0xb1));
    dots[0] = _mm256_permute2x128_si256(sum, sum, 0x00);
    dots[1] = _mm256_permute2x128_si256(sum, sum, 0x11);
}

// Sub-blocks of 16 with integer scales. The offset is taken off in int16: partial sums may wrap, the final one,
// at most 32 * 127 * 8, fits, so it is exact.
template <class Format>
struct Halved {
    using Scales = HalvedScales;
    static constexpr int kMaxTokens = 2;

    template <int kGroups, int kTokens>
    static inline void add_step(const __m256i (*w)[8], const Scales* scales, const StepInput& x,
                                Sums<kGroups, kTokens>& sums) {
        constexpr bool kNeedsConstant = Format::kHasMin || Format::kOffset != 0;
        __m256i total[kGroups][kTokens], constant[kTokens][2];
        for (int t = 0; t < kTokens && kNeedsConstant; ++t)
            constant_dots(x.q + t * kQuantBlock, Format::kHasMin ? 1 : Format::kOffset, constant[t]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            __m256i dot[kGroups][kTokens];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                for (int t = 0; t < kTokens; ++t) {
                    const __m256i q = broadcast4(x.q + t * kQuantBlock, 4 * half + i);
                    for (int g = 0; g < kGroups; ++g) {
                        const __m256i product = _mm256_maddubs_epi16(w[g][4 * half + i], q);
                        if (i == 0) dot[g][t] = product;
                        else accumulate_i16(dot[g][t], product);
                    }
                }
            for (int g = 0; g < kGroups; ++g)
                for (int t = 0; t < kTokens; ++t) {
                    if (Format::kOffset != 0) dot[g][t] = _mm256_sub_epi16(dot[g][t], constant[t][half]);
                    const __m256i wide = _mm256_madd_epi16(dot[g][t], scales[g].scale_i16x16[half]);
                    if (half == 0) total[g][t] = wide;
                    else accumulate_i32(total[g][t], wide);
                }
        }
        for (int t = 0; t < kTokens; ++t) {
            const __m256 xd = _mm256_broadcast_ss(x.scale + t);
            for (int g = 0; g < kGroups; ++g) {
                const __m256 dot = _mm256_cvtepi32_ps(total[g][t]);
                sums[g][t] = _mm256_fmadd_ps(dot, _mm256_mul_ps(scales[g].d, xd), sums[g][t]);
                if (!Format::kHasMin) continue;
                const __m256i min = _mm256_add_epi32(_mm256_madd_epi16(constant[t][0], scales[g].min_i16x16[0]),
                                                     _mm256_madd_epi16(constant[t][1], scales[g].min_i16x16[1]));
                const __m256 factor = _mm256_mul_ps(scales[g].minus_dmin, xd);
                sums[g][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(min), factor, sums[g][t]);
            }
        }
    }
};

// Write the sums of one group for one token, no further than the last row.
inline void write_rows(__m256 sums, float* out, int num_rows) {
    if (num_rows >= kLanes) return _mm256_storeu_ps(out, sums);
    alignas(32) float rows[kLanes];
    _mm256_store_ps(rows, sums);
    for (int lane = 0; lane < num_rows; ++lane) out[lane] = rows[lane];
}

template <class Format, template <class> class Kind>
struct Matmul {
    using Packed = typename Format::Packed;
    using Scales = typename Kind<Format>::Scales;
    static constexpr int kSteps = Format::kSteps;
    static constexpr size_t kBytesAhead = 1280;

    const Packed* weights;
    const ActTile& tile;
    float* out;
    size_t out_stride;
    int rows;

    const Packed* group_blocks(int group) const {
        return weights + static_cast<size_t>(tile.k / kQuantBlock / kSteps) * group;
    }

    StepInput input(int step, int t) const { return shared::step_input(tile, step, t); }

    // One token: weights and sums never leave the registers. Several groups are as many streams from memory.
    template <int kGroups>
    void run_one(int group) const {
        const Packed* blocks[kGroups];
        for (int g = 0; g < kGroups; ++g) blocks[g] = group_blocks(group + g);
        Sums<1, 1> sums[kGroups];
        for (int g = 0; g < kGroups; ++g) sums[g][0][0] = _mm256_setzero_ps();
        const int num_steps = tile.k / kQuantBlock;
        for (int step = 0; step < num_steps; ++step) {
            for (int g = 0; g < kGroups; ++g) {
                __m256i w[1][8];
                const Packed& block = blocks[g][step / kSteps];
                prefetch_ahead<kSteps, kBytesAhead>(blocks[g], static_cast<size_t>(num_steps),
                                                    static_cast<size_t>(step), kGroups);
                Format::unpack(block, step % kSteps, w[0]);
                const Scales scales[1] = {Format::scales(block, step % kSteps)};
                Kind<Format>::template add_step<1, 1>(w, scales, input(step, 0), sums[g]);
            }
        }
        for (int g = 0; g < kGroups; ++g)
            write_rows(sums[g][0][0], out + (group + g) * kLanes, rows - (group + g) * kLanes);
    }

    template <int kGroups, int kTokens>
    static inline void add_tokens(const __m256i (*w)[8], const Scales* scales, const StepInput& x, int t,
                                  __m256 (*acc)[kTileTokens]) {
        Sums<kGroups, kTokens> sums;
        for (int g = 0; g < kGroups; ++g)
            for (int i = 0; i < kTokens; ++i) sums[g][i] = acc[g][t + i];
        Kind<Format>::template add_step<kGroups, kTokens>(w, scales, x, sums);
        for (int g = 0; g < kGroups; ++g)
            for (int i = 0; i < kTokens; ++i) acc[g][t + i] = sums[g][i];
    }

    template <int kGroups>
    void run_tile(int group) const {
        __m256 acc[kGroups][kTileTokens];
        for (int g = 0; g < kGroups; ++g)
            for (int t = 0; t < tile.n; ++t) acc[g][t] = _mm256_setzero_ps();
        for (int step = 0; step < tile.k / kQuantBlock; ++step) {
            __m256i w[kGroups][8];
            Scales scales[kGroups];
            for (int g = 0; g < kGroups; ++g) {
                const Packed& block = group_blocks(group + g)[step / kSteps];
                Format::unpack(block, step % kSteps, w[g]);
                scales[g] = Format::scales(block, step % kSteps);
            }
            int t = 0;
            constexpr int kMax = Kind<Format>::kMaxTokens;
            for (; t + kMax <= tile.n; t += kMax) add_tokens<kGroups, kMax>(w, scales, input(step, t), t, acc);
            for (; t + 2 <= tile.n; t += 2) add_tokens<kGroups, 2>(w, scales, input(step, t), t, acc);
            if (t < tile.n) add_tokens<kGroups, 1>(w, scales, input(step, t), t, acc);
        }
        for (int g = 0; g < kGroups; ++g)
            for (int t = 0; t < tile.n; ++t)
                write_rows(acc[g][t], out + t * out_stride + (group + g) * kLanes, rows - (group + g) * kLanes);
    }

    void run(int group_begin, int group_end) const {
        int group = group_begin;
        if (tile.n == 1) {
            for (; group + 4 <= group_end; group += 4) run_one<4>(group);
            for (; group < group_end; ++group) run_one<1>(group);
            return;
        }
        for (; group + 2 <= group_end; group += 2) run_tile<2>(group);
        if (group < group_end) run_tile<1>(group);
    }
};

template <class Format, template <class> class Kind>
void matmul(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin,
            int group_end) noexcept {
    const auto* weights = reinterpret_cast<const typename Format::Packed*>(packed);
    Matmul<Format, Kind>{weights, tile, out, out_stride, rows}.run(group_begin, group_end);
}

constexpr KernelTable make_matmul_kernels() {
    KernelTable t{};
    t.matmul[static_cast<int>(Type::Q4_0)] = matmul<Q4_0, Affine>;
    t.matmul[static_cast<int>(Type::Q4_1)] = matmul<Q4_1, Affine>;
    t.matmul[static_cast<int>(Type::Q5_0)] = matmul<Q5_0, Affine>;
    t.matmul[static_cast<int>(Type::Q5_1)] = matmul<Q5_1, Affine>;
    t.matmul[static_cast<int>(Type::Q4_K)] = matmul<Q4_K, Affine>;
    t.matmul[static_cast<int>(Type::Q5_K)] = matmul<Q5_K, Affine>;
    t.matmul[static_cast<int>(Type::Q8_0)] = matmul<Q8_0, Signed>;
    t.matmul[static_cast<int>(Type::IQ4_NL)] = matmul<IQ4_NL, Signed>;
    t.matmul[static_cast<int>(Type::Q2_K)] = matmul<Q2_K, Halved>;
    t.matmul[static_cast<int>(Type::Q3_K)] = matmul<Q3_K, Halved>;
    t.matmul[static_cast<int>(Type::Q6_K)] = matmul<Q6_K, Halved>;
    return t;
}

}  // namespace

constinit const KernelTable matmul_kernels = make_matmul_kernels();

}  // namespace kvarn::avx2
