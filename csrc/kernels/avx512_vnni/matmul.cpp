// Matrix times activations with vpdpbusd. A step is 32 columns of 8 or 16 rows; its weights are unpacked once and meet
// every token of the tile, kSpans spans of rows and kTokens tokens at a time.
//
// Sums over a step's part are integers and exact; then one fma per part and token for the scale, and one for the
// minimum where a type has it, always in that order: results do not depend on any tile size or width here.
#include "../avx2/prefetch.h"
#include "../shared/step_input.h"
#include "formats.h"

namespace kvarn::avx512_vnni {
namespace {

using shared::StepInput;

template <class Format, class V>
struct Matmul {
    using Packed = typename Format::Packed;
    using Ints = typename V::Ints;
    using Floats = typename V::Floats;
    static constexpr int kSteps = Format::kSteps, kParts = Format::kParts, kMaxTokens = 4;
    static constexpr int kRows = V::kGroups * kLanes;
    static constexpr size_t kBytesAhead = 1280;  // 1024 and 1536 are as good
    static_assert((Format::kOffset & (Format::kOffset - 1)) == 0);

    const Packed* weights;
    const ActTile& tile;
    float* out;
    size_t out_stride;
    int rows;

    // The unpacked weights of one step of one span of kRows rows.
    struct Span {
        Ints w[8];
        Scales<V, kParts> scales;
    };

    const Packed* blocks_of(int group) const {
        return weights + static_cast<size_t>(tile.k / kQuantBlock / kSteps) * group;
    }

    [[gnu::always_inline]] inline void unpack(int group, int step, Span& span) const {
        const Packed& a = blocks_of(group)[step / kSteps];
        const Packed& b = blocks_of(group + V::kGroups - 1)[step / kSteps];
        Format::template unpack<V>(a, b, step % kSteps, span.w);
        span.scales = Format::template scales<V>(a, b, step % kSteps, factors_of<V>(a, b));
    }

    template <int kSpans>
    [[gnu::always_inline]] inline void prefetch(int group, int step) const {
        const size_t num_steps = static_cast<size_t>(tile.k / kQuantBlock);
        for (int g = 0; g < V::kGroups; ++g)
            avx2::prefetch_ahead<kSteps, kBytesAhead>(blocks_of(group + g), num_steps, static_cast<size_t>(step),
                                                      kSpans * V::kGroups);
    }

    StepInput input(int step, int t) const { return shared::step_input(tile, step, t); }

    static Ints broadcast4(const int8_t* q, int j) {
        int four;
        __builtin_memcpy(&four, q + 4 * j, sizeof four);
        return V::words(four);
    }

    // Minus the sum of a token's q over a part: what a weight's offset of one adds too much.
    static Ints minus_sum(const int32_t* sums, int part) {
        return kParts == 1 ? V::sum(V::words(sums[0]), V::words(sums[1])) : V::words(sums[part]);
    }

    // Adds a step to sums[s * kStride + t], in registers or in memory: they are read after the dot products, which need
    // the registers.
    template <int kSpans, int kTokens, int kStride>
    [[gnu::always_inline]] static inline void add_step(const Span* spans, const StepInput& x, Floats* sums) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            Ints dot[kSpans][kTokens];
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) {
                Ints start = V::words(0);
                if (Format::kOffset != 0)
                    start = V::template scaled_up<Format::kOffset>(minus_sum(x.minus_sums + 2 * t, part));
                for (int s = 0; s < kSpans; ++s) dot[s][t] = start;
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8 / kParts; ++i) {
                const int j = part * (8 / kParts) + i;
#pragma GCC unroll 4
                for (int t = 0; t < kTokens; ++t) {
                    const Ints q = broadcast4(x.q + t * kQuantBlock, j);
                    for (int s = 0; s < kSpans; ++s) dot[s][t] = V::dot(dot[s][t], spans[s].w[j], q);
                }
            }
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) {
                const Floats xd = V::all(x.scale[t]);
                for (int s = 0; s < kSpans; ++s) {
                    const Floats scale = V::times(spans[s].scales.scale[part], xd);
                    Floats& sum = sums[s * kStride + t];
                    sum = V::add_product(V::floats(dot[s][t]), scale, sum);
                }
                if (!Format::kHasMin) continue;
                const Floats xsum = kParts == 1 ? V::all(x.sum[t])
                                                : V::all(-static_cast<float>(x.minus_sums[2 * t + part]) * x.scale[t]);
                for (int s = 0; s < kSpans; ++s) {
                    Floats& sum = sums[s * kStride + t];
                    sum = V::add_product(spans[s].scales.min[part], xsum, sum);
                }
            }
        }
    }

    void write(Floats sums, int group, int t) const {
        const int left = rows - group * kLanes;
        V::store(out + t * out_stride + group * kLanes, sums, left < kRows ? left : kRows);
    }

    // Inlined by force: with the largest blocks the compiler would rather hand the weights over in memory.
    template <int kSpans>
    [[gnu::always_inline]] inline void unpack_spans(int group, int step, Span* spans) const {
        for (int s = 0; s < kSpans; ++s) {
            prefetch<kSpans>(group + s * V::kGroups, step);
            unpack(group + s * V::kGroups, step, spans[s]);
        }
    }

    // A block of kSpans spans, which meet the tokens one after the other: unpacked together they fill the registers.
    template <int kSpans, int kTokens>
    [[gnu::always_inline]] inline void add_block(int group, int block, Floats (*sums)[kTokens]) const {
        const Packed *a[kSpans], *b[kSpans];
        Factors<V> factors[kSpans];
#pragma GCC unroll 2
        for (int s = 0; s < kSpans; ++s) {
            a[s] = blocks_of(group + s * V::kGroups) + block;
            b[s] = blocks_of(group + (s + 1) * V::kGroups - 1) + block;
            factors[s] = factors_of<V>(*a[s], *b[s]);
        }
        for (int part = 0; part < kSteps; ++part) {
            const int step = block * kSteps + part;
#pragma GCC unroll 2
            for (int s = 0; s < kSpans; ++s) {
                prefetch<kSpans>(group + s * V::kGroups, step);
                Span span;
                Format::template unpack<V>(*a[s], *b[s], part, span.w);
                span.scales = Format::template scales<V>(*a[s], *b[s], part, factors[s]);
                add_step<1, kTokens, kTokens>(&span, input(step, 0), sums[s]);
            }
        }
    }

    // Up to kMaxTokens tokens: sums stay in registers.
    template <int kSpans, int kTokens>
    void run_few(int group) const {
        Floats sums[kSpans][kTokens];
        for (auto& of_span : sums)
            for (Floats& sum : of_span) sum = V::zero();
        for (int block = 0; block < tile.k / kQuantBlock / kSteps; ++block)
            add_block<kSpans, kTokens>(group, block, sums);
        for (int s = 0; s < kSpans; ++s)
            for (int t = 0; t < kTokens; ++t) write(sums[s][t], group + s * V::kGroups, t);
    }

    template <int kSpans>
    void run_tile(int group) const {
        Floats sums[kSpans * kTileTokens];
        for (int s = 0; s < kSpans; ++s)
            for (int t = 0; t < tile.n; ++t) sums[s * kTileTokens + t] = V::zero();
        for (int step = 0; step < tile.k / kQuantBlock; ++step) {
            Span spans[kSpans];
            unpack_spans<kSpans>(group, step, spans);
            int t = 0;
            for (; t + kMaxTokens <= tile.n; t += kMaxTokens)
                add_step<kSpans, kMaxTokens, kTileTokens>(spans, input(step, t), sums + t);
            if (tile.n - t == 3) add_step<kSpans, 3, kTileTokens>(spans, input(step, t), sums + t);
            else if (tile.n - t == 2) add_step<kSpans, 2, kTileTokens>(spans, input(step, t), sums + t);
            else if (tile.n - t == 1) add_step<kSpans, 1, kTileTokens>(spans, input(step, t), sums + t);
        }
        for (int s = 0; s < kSpans; ++s)
            for (int t = 0; t < tile.n; ++t) write(sums[s * kTileTokens + t], group + s * V::kGroups, t);
    }

    template <int kSpans>
    int run_spans(int group, int group_end) const {
        for (; group + kSpans * V::kGroups <= group_end; group += kSpans * V::kGroups) {
            switch (tile.n) {
                case 1: run_few<kSpans, 1>(group); break;
                case 2: run_few<kSpans, 2>(group); break;
                case 3: run_few<kSpans, 3>(group); break;
                case 4: run_few<kSpans, 4>(group); break;
                default: run_tile<kSpans>(group);
            }
        }
        return group;
    }
};

template <class Format>
void matmul(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group,
            int group_end) noexcept {
    const auto* weights = reinterpret_cast<const typename Format::Packed*>(packed);
    const Matmul<Format, Sixteen> wide{weights, tile, out, out_stride, rows};
    group = wide.template run_spans<2>(group, group_end);
    group = wide.template run_spans<1>(group, group_end);
    Matmul<Format, Eight>{weights, tile, out, out_stride, rows}.template run_spans<1>(group, group_end);
}

constexpr KernelTable make_matmul_kernels() {
    KernelTable t{};
#define KVARN_SET(type) t.matmul[static_cast<int>(Type::type)] = matmul<type>;
    KVARN_QUANTIZED_TYPES(KVARN_SET)
#undef KVARN_SET
    return t;
}

}  // namespace

constinit const KernelTable matmul_kernels = make_matmul_kernels();

}  // namespace kvarn::avx512_vnni
