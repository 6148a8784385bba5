// Blocks of 32 values with importance, and IQ4_NL: a search over grids, then least squares until nothing moves.
// Eight blocks of a row are fitted side by side; past the end of the row they are zeros and are not written.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "blocks.h"
#include "encode.h"
#include "fit.h"
#include "half.h"

namespace kvarn::encode {
namespace {

using namespace wide;

constexpr int kBlock = 32, kRefits = 3;
constexpr float kRounding = 1e-6f;  // of a sum of 32 products in float
constexpr float kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // IQ4_NL

// x ~ scale * level(q) + low
struct Fitted {
    Floats scale, low, q[kBlock];
};

struct Group {
    Floats x[kBlock], w[kBlock];
};

Floats as_halves(Floats values) {
    for (int lane = 0; lane < kWide; ++lane) values.set(lane, half_to_float(float_to_half(values[lane])));
    return values;
}

// The halves next to these, further from zero or nearer; zero and the largest stay.
Floats next_halves(Floats halves, int step) {
    for (int lane = 0; lane < kWide; ++lane) {
        const uint16_t bits = float_to_half(halves[lane]), size = bits & 0x7fffu;
        if (size != 0 && size < 0x7bffu) halves.set(lane, half_to_float(static_cast<uint16_t>(bits + step)));
    }
    return halves;
}

KVARN_WIDE Floats inverse(Floats x) { return choose(x != 0.0f, 1.0f / x, Floats{}); }

// The nearest whole number of -middle .. middle - 1.
struct Whole {
    float middle;
    KVARN_WIDE Floats index(Floats x) const { return held(nearest(x), -middle, middle - 1) + middle; }
    KVARN_WIDE Floats level(Floats index) const { return index - middle; }
    float lowest() const { return -middle; }
    float spread() const { return 0.1f; }
    int tries() const { return 9; }
};

// The nearest whole number of 0 .. max_quant, above a minimum.
struct Steps {
    float max_quant;
    KVARN_WIDE Floats index(Floats x) const { return held(nearest(x), 0, max_quant); }
    KVARN_WIDE Floats level(Floats index) const { return index; }
};

// The nearest of IQ4_NL's levels.
struct Table {
    KVARN_WIDE Floats index(Floats x) const {
        Floats found{};
        for (int i = 0; i < 15; ++i) found += choose(x > (kLevels[i] + kLevels[i + 1]) / 2, all(1), Floats{});
        return found;
    }
    KVARN_WIDE Floats level(Floats index) const {
        Floats found = all(kLevels[0]);
        for (int i = 1; i < 16; ++i)
            found += choose(index >= static_cast<float>(i), all(kLevels[i] - kLevels[i - 1]), Floats{});
        return found;
    }
    float lowest() const { return kLevels[0]; }
    float spread() const { return 1; }
    int tries() const { return 9; }
};

template <class Grid>
KVARN_WIDE void sums(const Group& in, const Grid& grid, Floats per_scale, Floats& sum_lx, Floats& sum_l2) {
    sum_lx = sum_l2 = Floats{};
    for (int i = 0; i < kBlock; ++i) {
        const Floats level = grid.level(grid.index(in.x[i] * per_scale));
        sum_lx += in.w[i] * in.x[i] * level;
        sum_l2 += in.w[i] * level * level;
    }
}

// Keeps a scale and a minimum, halves both, where they leave less than `least`.
template <class Grid>
void keep_if_less(const Group& in, const Grid& grid, Floats scale, Floats low, Floats& least, Fitted& out) {
    const Floats per_scale = inverse(scale);
    Floats error{};
    for (int i = 0; i < kBlock; ++i) {
        const Floats off = scale * grid.level(grid.index((in.x[i] - low) * per_scale)) + low - in.x[i];
        error += in.w[i] * off * off;
    }
    const Ints is_less = error < least;
    least = choose(is_less, error, least);
    out.scale = choose(is_less, scale, out.scale);
    out.low = choose(is_less, low, out.low);
}

// Scale and minimum as they are stored: of the halves around the best ones those that leave the least error. Where one
// column outweighs all others, that rounding is most of its error.
template <class Grid>
Floats round_to_halves(const Group& in, const Grid& grid, Floats scale, Floats low, bool has_low, Fitted& out) {
    Floats least = all(std::numeric_limits<float>::infinity());
    out.scale = as_halves(scale), out.low = as_halves(low);
    const Floats scales = out.scale, lows = out.low;
    for (const int up : {0, -1, 1})
        for (const int down : {0, -1, 1})
            if (has_low || down == 0)
                keep_if_less(in, grid, next_halves(scales, up), next_halves(lows, down), least, out);
    return least;
}

template <class Grid>
void index_all(const Group& in, const Grid& grid, Fitted& out) {
    const Floats per_scale = inverse(out.scale);
    for (int i = 0; i < kBlock; ++i) out.q[i] = grid.index((in.x[i] - out.low) * per_scale);
}

// Both signs of the scale are tried: the grids reach further down than up. The best by least squares is rounded to a
// half; so is every other that might leave less than it does then.
template <class Grid>
void fit_scale(const Group& in, const Grid& grid, Fitted& out) {
    constexpr int kMaxTried = 2 * (2 * 9 + 1) + kRefits;
    const Floats largest = fit::peak(in.x);
    Floats scales[kMaxTried], merits[kMaxTried], best{}, merit{}, sum_lx, sum_l2;
    int tried = 0;
    const auto try_grid = [&](Floats per_scale) {
        sums(in, grid, per_scale, sum_lx, sum_l2);
        scales[tried] = choose(sum_l2 > 0.0f, sum_lx / sum_l2, Floats{});
        merits[tried] = scales[tried] * sum_lx;
        const Ints is_better = merits[tried] > merit;
        merit = choose(is_better, merits[tried], merit);
        best = choose(is_better, scales[tried], best);
        ++tried;
    };
    for (int t = -grid.tries(); t <= grid.tries(); ++t) {
        const float reach = grid.lowest() - grid.spread() * static_cast<float>(t);
        try_grid(reach * inverse(largest));
        try_grid(-reach * inverse(largest));
    }
    for (int t = 0; t < kRefits; ++t) try_grid(inverse(best));
    Floats least = round_to_halves(in, grid, best, Floats{}, false, out), squares{};
    for (int i = 0; i < kBlock; ++i) squares += in.w[i] * in.x[i] * in.x[i];
    for (int t = 0; t < tried; ++t) {
        const Floats at_least = squares - merits[t] - kRounding * squares;
        if (any(at_least < least)) keep_if_less(in, grid, as_halves(scales[t]), Floats{}, least, out);
    }
    index_all(in, grid, out);
}

void fit_scale_and_low(const Group& in, float max_quant, Fitted& out) {
    const fit::Affine found = fit::fit_affine(in.x, in.w, {max_quant, -0.9f, 0.05f, 36, false, true});
    round_to_halves(in, Steps{max_quant}, found.scale, found.low, true, out);
    index_all(in, Steps{max_quant}, out);
}

void store_low_bits(const Fitted& fitted, int lane, uint8_t* nibbles, uint8_t* fifth_bits) {
    int quants[kBlock];
    for (int i = 0; i < kBlock; ++i) quants[i] = static_cast<int>(fitted.q[i][lane]);
    for (int i = 0; i < kBlock / 2; ++i)
        nibbles[i] = static_cast<uint8_t>((quants[i] & 15) | (quants[i + kBlock / 2] & 15) << 4);
    if (fifth_bits == nullptr) return;
    std::memset(fifth_bits, 0, 4);
    for (int i = 0; i < kBlock; ++i) fifth_bits[i / 8] |= static_cast<uint8_t>(quants[i] >> 4 << i % 8);
}

void store(const Fitted& fitted, int lane, blocks::Q4_0& out) {
    out.d = float_to_half(fitted.scale[lane]);
    store_low_bits(fitted, lane, out.qs, nullptr);
}

void store(const Fitted& fitted, int lane, blocks::Q5_0& out) {
    out.d = float_to_half(fitted.scale[lane]);
    store_low_bits(fitted, lane, out.qs, out.qh);
}

void store(const Fitted& fitted, int lane, blocks::Q4_1& out) {
    out.d = float_to_half(fitted.scale[lane]), out.m = float_to_half(fitted.low[lane]);
    store_low_bits(fitted, lane, out.qs, nullptr);
}

void store(const Fitted& fitted, int lane, blocks::Q5_1& out) {
    out.d = float_to_half(fitted.scale[lane]), out.m = float_to_half(fitted.low[lane]);
    store_low_bits(fitted, lane, out.qs, out.qh);
}

// weight = importance * sqrt(sigma2 + x^2); the square of the value where no importance is known.
Group load(const float* x, const float* importance, int count, float sigma2) {
    float values[kBlock * kWide] = {}, weights[kBlock * kWide] = {};
    std::copy_n(x, count, values);
    for (int i = 0; i < count; ++i)
        weights[i] = importance == nullptr ? x[i] * x[i] : importance[i] * std::sqrt(sigma2 + x[i] * x[i]);
    Group group;
    interleave(values, kBlock, group.x);
    interleave(weights, kBlock, group.w);
    return group;
}

template <class Block, class Fit>
void encode_groups(const float* x, int columns, const float* importance, uint8_t* out, Fit&& fit) {
    float squares = 0;
    for (int i = 0; i < columns; ++i) squares += x[i] * x[i];
    const float sigma2 = squares / static_cast<float>(columns);
    for (int at = 0; at < columns; at += kBlock * kWide) {
        const int count = std::min(kBlock * kWide, columns - at);
        const Group group = load(x + at, importance == nullptr ? nullptr : importance + at, count, sigma2);
        Fitted fitted;
        fit(group, fitted);
        for (int lane = 0; lane < count / kBlock; ++lane, out += sizeof(Block)) {
            Block block;
            store(fitted, lane, block);
            std::memcpy(out, &block, sizeof block);
        }
    }
}

}  // namespace

void weighted_blocks_row(Type type, const float* x, int columns, const float* importance, uint8_t* out) noexcept {
    const auto whole = [](float middle) {
        return [middle](const Group& in, Fitted& fitted) { fit_scale(in, Whole{middle}, fitted); };
    };
    const auto affine = [](float max_quant) {
        return [max_quant](const Group& in, Fitted& fitted) { fit_scale_and_low(in, max_quant, fitted); };
    };
    switch (type) {
        case Type::Q4_0: return encode_groups<blocks::Q4_0>(x, columns, importance, out, whole(8));
        case Type::Q5_0: return encode_groups<blocks::Q5_0>(x, columns, importance, out, whole(16));
        case Type::Q4_1: return encode_groups<blocks::Q4_1>(x, columns, importance, out, affine(15));
        case Type::Q5_1: return encode_groups<blocks::Q5_1>(x, columns, importance, out, affine(31));
        default:
            return encode_groups<blocks::Q4_0>(  // IQ4_NL has the same bytes
                x, columns, importance, out, [](const Group& in, Fitted& fitted) { fit_scale(in, Table{}, fitted); });
    }
}

}  // namespace kvarn::encode
