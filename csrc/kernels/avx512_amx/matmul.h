// Matrix times activations with tiles of bf16, for a struct Tiles as in tiles.h. docs/adr/0043 has the arithmetic.
//
// Weights are unpacked to bf16 with their scales applied, a panel of 32 rows at a time, and meet all tokens of the
// call. A sum stays in its tile register while the columns of a panel are added, in ascending steps of 32; between
// panels it waits in `out` as the float it is. So results do not depend on any size here.
#pragma once
#include "../avx2/prefetch.h"
#include "nibbles.h"
#include "unpack.h"

namespace kvarn::avx512_amx {
namespace {

constexpr int kTileGroups = kTileRows / kLanes;
constexpr int kPanelTiles = 2;    // of 16 rows
constexpr int kPanelSteps = 16;   // with 2 tiles of 1 KiB each this leaves a third of 48 KiB for tokens and sums
constexpr int kStepsBetween = 2;  // from unpacking to multiplying where few tokens let both run side by side
constexpr int kRingSteps = 4;

template <class Tiles, class Format>
class Matmul {
public:
    Matmul(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_end)
        : weights_(reinterpret_cast<const Packed*>(packed)), tile_(tile), out_(out), out_stride_(out_stride),
          rows_(rows < group_end * kLanes ? rows : group_end * kLanes), group_end_(group_end) {}

    void run(int group_begin) {
        if (tile_.n == 1 && kHasNibbles) run_one_token(group_begin);
        else if (tile_.n <= kTileTokens) run_few_tokens(group_begin);
        else run_many_tokens(group_begin);
    }

private:
    using Packed = typename Format::Packed;
    static constexpr int kSteps = Format::kSteps;
    static constexpr int kPanelGroups = kPanelTiles * kTileGroups;
    static constexpr bool kHasNibbles = NibbleValues<Format>::kExist;

    // Where the sums of 16 rows of the weights lie, a row of them for each token.
    struct Target {
        float* at;
        size_t stride;
    };

    int num_steps() const { return tile_.k / kTileColumns; }
    const Packed* blocks_of(int group) const {
        return weights_ + static_cast<size_t>(num_steps() / kSteps) * (group < group_end_ ? group : group_end_ - 1);
    }

    [[gnu::always_inline]] inline void unpack(int group, int step, uint16_t* to) const {
        unpack_tile<Format>(blocks_of(group)[step / kSteps], blocks_of(group + 1)[step / kSteps], step % kSteps, to);
    }

    // Rows of a tile that has fewer than 16 are summed in a buffer: nothing beyond them may be written.
    bool is_whole(int group) const { return (group + kTileGroups) * kLanes <= rows_; }
    Target target_of(int group, float (*rest)[kTileRows]) const {
        if (is_whole(group)) return {out_ + group * kLanes, out_stride_};
        return {rest[0], kTileRows};
    }
    void write_rest(int group, const float (*rest)[kTileRows]) const {
        const __mmask16 valid = static_cast<__mmask16>((1u << (rows_ - group * kLanes)) - 1);
        for (int token = 0; token < tile_.n; ++token)
            _mm512_mask_storeu_ps(out_ + token * out_stride_ + group * kLanes, valid, _mm512_loadu_ps(rest[token]));
    }

    template <int kTokenTiles, int kRowTiles, class Body>
    [[gnu::always_inline]] static inline void for_sums(Body body) {
        body.template operator()<0, 0>();
        if constexpr (kRowTiles == 2) body.template operator()<0, 1>();
        if constexpr (kTokenTiles == 2) body.template operator()<1, 0>();
        if constexpr (kTokenTiles == 2 && kRowTiles == 2) body.template operator()<1, 1>();
    }

    template <int kTokenTiles, int kRowTiles>
    void begin_sums(const Target* targets, bool is_first) {
        for_sums<kTokenTiles, kRowTiles>([&]<int kTokens, int kWeights>() {
            const Target& from = targets[kWeights];
            if (is_first) tiles_.template zero<2 * kTokens + kWeights>();
            else
                tiles_.template load_sums<2 * kTokens + kWeights>(from.at + kTokens * kTileRows * from.stride,
                                                                  from.stride);
        });
    }

    template <int kTokenTiles, int kRowTiles>
    void end_sums(const Target* targets) {
        for_sums<kTokenTiles, kRowTiles>([&]<int kTokens, int kWeights>() {
            const Target& to = targets[kWeights];
            tiles_.template store_sums<2 * kTokens + kWeights>(to.at + kTokens * kTileRows * to.stride, to.stride);
        });
    }

    // Adds 32 columns; the tiles of weights are neighbours.
    template <int kTokenTiles, int kRowTiles>
    [[gnu::always_inline]] inline void add_step(const uint16_t* tokens, const uint16_t* weights) {
        tiles_.template load_tokens<0>(tokens);
        tiles_.template load_weights<0>(weights);
        tiles_.template multiply<0, 0>();
        if constexpr (kRowTiles == 2) {
            tiles_.template load_weights<1>(weights + kTileValues);
            tiles_.template multiply<0, 1>();
        }
        if constexpr (kTokenTiles == 2) {
            tiles_.template load_tokens<1>(tokens + kTileValues);
            tiles_.template multiply<1, 0>();
            if constexpr (kRowTiles == 2) tiles_.template multiply<1, 1>();
        }
    }

    // Up to 32 tokens: each step is unpacked once for all of them, and multiplied while the next ones are unpacked.
    template <int kTokenTiles, int kRowTiles>
    void run_few(int group) {
        alignas(64) uint16_t ring[kRingSteps][kPanelTiles * kTileValues];
        alignas(64) float rest[kTileTokens][kTileRows];
        Target targets[kRowTiles];
        for (int i = 0; i < kRowTiles; ++i) targets[i] = target_of(group + kTileGroups * i, rest);
        const size_t values = static_cast<size_t>(tile_.n) * kTileColumns;
        begin_sums<kTokenTiles, kRowTiles>(targets, true);
        for (int step = 0; step < num_steps() + kStepsBetween; ++step) {
            if (step < num_steps()) {
                for (int i = 0; i < kRowTiles; ++i) {
                    prefetch(group + kTileGroups * i, step);
                    unpack(group + kTileGroups * i, step, ring[step % kRingSteps] + kTileValues * i);
                }
            }
            const int ready = step - kStepsBetween;
            if (ready >= 0) add_step<kTokenTiles, kRowTiles>(tile_.rounded + values * ready, ring[ready % kRingSteps]);
        }
        end_sums<kTokenTiles, kRowTiles>(targets);
        const int last = group + kTileGroups * (kRowTiles - 1);
        if (!is_whole(last)) write_rest(last, rest);
    }

    [[gnu::always_inline]] inline void prefetch(int group, int step) const {
        constexpr size_t kBytesAhead = 1024;
        for (int g = 0; g < kTileGroups; ++g)
            avx2::prefetch_ahead<kSteps, kBytesAhead>(blocks_of(group + g)[step / kSteps], step % kSteps);
    }

    void run_few_tokens(int group) {
        tiles_.configure(tile_.n);
        const bool has_two = tile_.n > kTileRows;
        for (; group + kTileGroups < group_end_; group += kPanelGroups) {
            if (has_two) run_few<2, 2>(group);
            else run_few<1, 2>(group);
        }
        if (group >= group_end_) return;
        if (has_two) run_few<2, 1>(group);
        else run_few<1, 1>(group);
    }

    // Steps are gathered one ahead of where they are looked up, as that is read again from memory.
    template <int kRowTiles>
    void run_one(int group) {
        alignas(64) uint16_t ring[kRingSteps][kPanelTiles][kTileValues];
        NibbleRows rows[2][kRowTiles];
        tiles_.template zero<0>();
        if constexpr (kRowTiles == 2) tiles_.template zero<1>();
        for (int step = 0; step < num_steps() + kStepsBetween + 1; ++step) {
            const int gathered = step - 1, ready = gathered - kStepsBetween;
            for (int i = 0; i < kRowTiles && step < num_steps(); ++i) {
                const int at = group + kTileGroups * i, block = step / kSteps;
                prefetch(at, step);
                gather_step<Format>(blocks_of(at)[block], blocks_of(at + 1)[block], step % kSteps, rows[step % 2][i]);
            }
            for (int i = 0; i < kRowTiles && gathered >= 0 && gathered < num_steps(); ++i)
                look_up_tile<Format>(rows[gathered % 2][i], ring[gathered % kRingSteps][i]);
            if (ready < 0) continue;
            tiles_.load_token(tile_.rounded + kTileColumns * ready);
            tiles_.template add_rows<0>(ring[ready % kRingSteps][0]);
            if constexpr (kRowTiles == 2) tiles_.template add_rows<1>(ring[ready % kRingSteps][1]);
        }
        write_one<0>(group);
        if constexpr (kRowTiles == 2) write_one<1>(group + kTileGroups);
    }

    template <int kIndex>
    void write_one(int group) {
        alignas(64) float sums[kTileRows];
        tiles_.template store_row_sums<kIndex>(sums);
        const int left = rows_ - group * kLanes;
        const __mmask16 valid = static_cast<__mmask16>(left < kTileRows ? (1u << left) - 1 : 0xffff);
        _mm512_mask_storeu_ps(out_ + group * kLanes, valid, _mm512_load_ps(sums));
    }

    void run_one_token(int group) {
        if constexpr (kHasNibbles) {
            tiles_.configure_one();
            for (; group + kTileGroups < group_end_; group += kPanelGroups) run_one<2>(group);
            if (group < group_end_) run_one<1>(group);
        }
    }

    template <int kTokenTiles, int kRowTiles>
    void add_panel(const uint16_t* tokens, size_t step_values, const uint16_t* panel, int count, const Target* targets,
                   bool is_first) {
        begin_sums<kTokenTiles, kRowTiles>(targets, is_first);
        for (int step = 0; step < count; ++step)
            add_step<kTokenTiles, kRowTiles>(tokens + step_values * step, panel + kPanelTiles * kTileValues * step);
        end_sums<kTokenTiles, kRowTiles>(targets);
    }

    // Steps [first, first + count) of up to 32 rows: unpacked, then with every token.
    template <int kRowTiles>
    void run_panel(int group, int first, int count, float (*rest)[kTileRows]) {
        alignas(64) uint16_t panel[kPanelSteps * kPanelTiles * kTileValues];
        for (int step = 0; step < count; ++step)
            for (int i = 0; i < kRowTiles; ++i)
                unpack(group + kTileGroups * i, first + step, panel + kTileValues * (kPanelTiles * step + i));
        Target targets[kRowTiles];
        for (int i = 0; i < kRowTiles; ++i) targets[i] = target_of(group + kTileGroups * i, rest);
        for (int token = 0; token < tile_.n; token += kTileTokens) {
            const int n = tile_.n - token < kTileTokens ? tile_.n - token : kTileTokens;
            const size_t values = static_cast<size_t>(n) * kTileColumns;
            const uint16_t* tokens = tile_.rounded + static_cast<size_t>(token) * tile_.k + values * first;
            tiles_.configure(n);
            if (n > kTileRows) add_panel<2, kRowTiles>(tokens, values, panel, count, targets, first == 0);
            else add_panel<1, kRowTiles>(tokens, values, panel, count, targets, first == 0);
            for (Target& target : targets) target.at += kTileTokens * target.stride;
        }
    }

    // Columns outside, rows inside: what the panels read of the tokens stays in the second cache.
    void run_many_tokens(int group_begin) {
        alignas(64) float rest[kRoundedTokens][kTileRows];
        const int last = group_begin + (group_end_ - group_begin - 1) / kTileGroups * kTileGroups;
        for (int first = 0; first < num_steps(); first += kPanelSteps) {
            const int left = num_steps() - first, count = left < kPanelSteps ? left : kPanelSteps;
            int group = group_begin;
            for (; group + kTileGroups < group_end_; group += kPanelGroups) run_panel<2>(group, first, count, rest);
            if (group < group_end_) run_panel<1>(group, first, count, rest);
        }
        if (!is_whole(last)) write_rest(last, rest);
    }

    const Packed* weights_;
    const ActTile& tile_;
    float* out_;
    size_t out_stride_;
    int rows_, group_end_;
    Tiles tiles_;
};

struct EvenFirst {
    alignas(64) uint16_t at[kTileColumns];
};

constexpr EvenFirst make_even_first() {
    EvenFirst order{};
    for (int i = 0; i < kTileColumns; ++i) order.at[i] = static_cast<uint16_t>(i < 16 ? 2 * i : 2 * i - 31);
    return order;
}

constexpr EvenFirst kEvenFirst = make_even_first();

template <class Tiles, class Format>
void matmul(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group,
            int group_end) noexcept {
    Matmul<Tiles, Format>(packed, tile, out, out_stride, rows, group_end).run(group);
}

void round_row(const float* x, int k, int t, int n, uint16_t* rounded) noexcept {
    const __m512i even_first = _mm512_load_si512(kEvenFirst.at);
    for (int block = 0; block < k / kTileColumns; ++block, x += kTileColumns) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
        uint16_t* to = rounded + (static_cast<size_t>(block) * n + t) * kTileColumns;
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(even_first, reinterpret_cast<__m512i>(both)));
    }
}

template <class Tiles>
constexpr KernelTable make_matmul_kernels() {
    KernelTable t{};
    t.round_row = round_row;
#define KVARN_SET(type) t.matmul[static_cast<int>(Type::type)] = matmul<Tiles, avx512_vnni::type>;
    KVARN_QUANTIZED_TYPES(KVARN_SET)
#undef KVARN_SET
    return t;
}

}  // namespace
}  // namespace kvarn::avx512_amx
