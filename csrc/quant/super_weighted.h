// Super-blocks with importance: scales are chosen among their neighbours by the weighted error they lead to, and the
// super-block's own scale by least squares on the quants. A search of our own, past llama.cpp's.
#pragma once
#include <limits>

#include "super.h"

namespace kvarn::super {
namespace {

constexpr float kShrinks[] = {1.0f, 0.976f, 0.952f, 0.905f};  // of the largest scale's place below max_scale
constexpr int kRefits = 2;

struct AffineGrid {
    float d, dmin, max_quant, max_scale;
};

// The quants of a sub-block for one pair of scale and minimum; returns the weighted error.
template <int N>
Floats affine_quants(const Floats (&x)[N], const Floats (&w)[N], Floats step, Floats minimum, float max_quant,
                     Floats (&q)[N]) {
    const Floats per_step = inverse(step);
    Floats sum{};
    for (int i = 0; i < N; ++i) {
        q[i] = held(nearest((x[i] + minimum) * per_step), 0, max_quant);
        const Floats error = step * q[i] - minimum - x[i];
        sum += w[i] * error * error;
    }
    return sum;
}

template <int N>
struct AffineChoice {
    static constexpr int kGroups = Parts<N>::kGroups;
    Floats scale[kGroups] = {}, minimum[kGroups] = {}, q[kGroups][N] = {};
    float error = std::numeric_limits<float>::infinity();
    AffineGrid grid{};
};

// Both neighbours of the wished scale and of the wished minimum: the best of four.
template <int N>
void choose_affine(const Parts<N>& parts, const fit::Affine* wished, const AffineGrid& grid, AffineChoice<N>& out) {
    out.grid = grid;
    out.error = 0;
    for (int g = 0; g < Parts<N>::kGroups; ++g) {
        const Floats scale = whole_below(grid.d > 0 ? wished[g].scale / grid.d : Floats{});
        const Floats minimum = whole_below(grid.dmin > 0 ? -wished[g].low / grid.dmin : Floats{});
        Floats least_error = all(std::numeric_limits<float>::infinity()), q[N];
        for (int t = 0; t < 4; ++t) {
            const Floats s = held(scale + static_cast<float>(t & 1), 0, grid.max_scale);
            const Floats m = held(minimum + static_cast<float>(t >> 1), 0, grid.max_scale);
            const Floats error = affine_quants(parts.x[g], parts.w[g], grid.d * s, grid.dmin * m, grid.max_quant, q);
            const Ints is_better = error < least_error;
            least_error = choose(is_better, error, least_error);
            out.scale[g] = choose(is_better, s, out.scale[g]);
            out.minimum[g] = choose(is_better, m, out.minimum[g]);
        }
        affine_quants(parts.x[g], parts.w[g], grid.d * out.scale[g], grid.dmin * out.minimum[g], grid.max_quant,
                      out.q[g]);
        for (int lane = 0; lane < kWide; ++lane) out.error += least_error[lane];
    }
}

// d and dmin by least squares for the quants chosen, as the file will hold them; false where they are not determined.
template <int N>
bool refit(const Parts<N>& parts, const AffineChoice<N>& choice, AffineGrid& grid) {
    Floats aa{}, ab{}, bb{}, ax{}, bx{};
    for (int g = 0; g < Parts<N>::kGroups; ++g)
        for (int i = 0; i < N; ++i) {
            const Floats a = choice.scale[g] * choice.q[g][i], b = -choice.minimum[g], w = parts.w[g][i];
            aa += w * a * a, ab += w * a * b, bb += w * b * b;
            ax += w * a * parts.x[g][i], bx += w * b * parts.x[g][i];
        }
    double sums[5] = {};
    for (int lane = 0; lane < kWide; ++lane)
        sums[0] += aa[lane], sums[1] += ab[lane], sums[2] += bb[lane], sums[3] += ax[lane], sums[4] += bx[lane];
    const double determinant = sums[0] * sums[2] - sums[1] * sums[1];
    if (!(determinant > 1e-9 * sums[0] * sums[2])) {
        if (!(sums[0] > 0) || sums[2] > 0) return false;
        grid.d = rounded_half(static_cast<float>(sums[3] / sums[0]));
        return grid.d > 0;
    }
    grid.d = rounded_half(static_cast<float>((sums[3] * sums[2] - sums[4] * sums[1]) / determinant));
    grid.dmin = rounded_half(static_cast<float>((sums[4] * sums[0] - sums[3] * sums[1]) / determinant));
    return grid.d > 0 && grid.dmin >= 0;
}

template <int N>
void encode_affine_weighted(const Parts<N>& parts, const fit::AffineSearch& search, int max_scale, Chosen& out) {
    constexpr int kGroups = Parts<N>::kGroups;
    fit::Affine wished[kGroups];
    float most_scale = 0, most_minimum = 0;
    for (int g = 0; g < kGroups; ++g) {
        wished[g] = fit::fit_affine(parts.x[g], parts.w[g], search);
        most_scale = std::max(most_scale, largest(wished[g].scale));
        most_minimum = std::max(most_minimum, largest(-wished[g].low));
    }
    const float limit = static_cast<float>(max_scale);
    AffineChoice<N> best, choice;
    for (const float shrink : kShrinks) {
        AffineGrid grid{rounded_half(most_scale / (limit * shrink)), rounded_half(most_minimum / (limit * shrink)),
                        search.max_quant, limit};
        for (int round = 0; round <= kRefits; ++round) {
            choose_affine(parts, wished, grid, choice);
            if (choice.error < best.error) best = choice;
            if (round == kRefits || !refit(parts, choice, grid)) break;
        }
    }
    out.d = float_to_half(best.grid.d);
    out.dmin = float_to_half(best.grid.dmin);
    for (int g = 0; g < kGroups; ++g) {
        store_quants(best.q[g], g, out.q);
        for (int lane = 0; lane < kWide; ++lane) {
            out.scale[kWide * g + lane] = static_cast<int>(best.scale[g][lane]);
            out.minimum[kWide * g + lane] = static_cast<int>(best.minimum[g][lane]);
        }
    }
}

template <int N>
struct SymmetricChoice {
    static constexpr int kGroups = Parts<N>::kGroups;
    Floats scale[kGroups] = {}, q[kGroups][N] = {};
    float error = std::numeric_limits<float>::infinity(), d = 0;
};

template <int N>
Floats symmetric_quants(const Floats (&x)[N], const Floats (&w)[N], Floats step, float middle, Floats (&q)[N]) {
    const Floats per_step = inverse(step);
    Floats sum{};
    for (int i = 0; i < N; ++i) {
        q[i] = held(nearest(x[i] * per_step), -middle, middle - 1);
        const Floats error = step * q[i] - x[i];
        sum += w[i] * error * error;
    }
    return sum;
}

template <int N>
void choose_symmetric(const Parts<N>& parts, const Floats* wished, float middle, float max_scale, float d,
                      SymmetricChoice<N>& out) {
    out.d = d;
    out.error = 0;
    for (int g = 0; g < Parts<N>::kGroups; ++g) {
        const Floats below = whole_below(wished[g] / d);
        Floats least_error = all(std::numeric_limits<float>::infinity()), q[N];
        for (int t = 0; t < 2; ++t) {
            const Floats s = held(below + static_cast<float>(t), -max_scale, max_scale - 1);
            const Floats error = symmetric_quants(parts.x[g], parts.w[g], d * s, middle, q);
            const Ints is_better = error < least_error;
            least_error = choose(is_better, error, least_error);
            out.scale[g] = choose(is_better, s, out.scale[g]);
        }
        symmetric_quants(parts.x[g], parts.w[g], d * out.scale[g], middle, out.q[g]);
        for (int lane = 0; lane < kWide; ++lane) out.error += least_error[lane];
    }
}

template <int N>
float refit(const Parts<N>& parts, const SymmetricChoice<N>& choice) {
    Floats ax{}, aa{};
    for (int g = 0; g < Parts<N>::kGroups; ++g)
        for (int i = 0; i < N; ++i) {
            const Floats a = choice.scale[g] * choice.q[g][i];
            ax += parts.w[g][i] * a * parts.x[g][i], aa += parts.w[g][i] * a * a;
        }
    double sums[2] = {};
    for (int lane = 0; lane < kWide; ++lane) sums[0] += ax[lane], sums[1] += aa[lane];
    return sums[1] > 0 ? rounded_half(static_cast<float>(sums[0] / sums[1])) : 0.0f;
}

template <int N>
void encode_symmetric_weighted(const Parts<N>& parts, int middle, int max_scale, Chosen& out) {
    constexpr int kGroups = Parts<N>::kGroups;
    const float mid = static_cast<float>(middle), limit = static_cast<float>(max_scale);
    Floats wished[kGroups];
    for (int g = 0; g < kGroups; ++g) wished[g] = fit::fit_symmetric(parts.x[g], parts.w[g], mid).scale;
    const float most = peak_of(wished);
    if (std::fabs(most) < fit::kSmallestPeak) return;  // out is all zero: d 0
    SymmetricChoice<N> best, choice;
    for (const float shrink : kShrinks) {
        float d = rounded_half(most / (-limit * shrink));
        for (int round = 0; round <= kRefits && d != 0; ++round) {
            choose_symmetric(parts, wished, mid, limit, d, choice);
            if (choice.error < best.error) best = choice;
            d = refit(parts, choice);
        }
    }
    out.d = float_to_half(best.d);
    for (int g = 0; g < kGroups && best.d != 0; ++g) {
        for (int i = 0; i < N; ++i) best.q[g][i] += all(mid);
        store_quants(best.q[g], g, out.q);
        for (int lane = 0; lane < kWide; ++lane) out.scale[kWide * g + lane] = static_cast<int>(best.scale[g][lane]);
    }
}

}  // namespace
}  // namespace kvarn::super
