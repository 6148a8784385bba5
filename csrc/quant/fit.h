// The scale, or scale and minimum, that suit a block best: a search over grids with least squares on each.
//
// Without importance the candidates, their order and every sum are those of llama.cpp's quantiser, so that files are
// equal byte for byte; nothing here may be reordered or contracted.
#pragma once
#include "wide.h"

namespace kvarn::fit {
namespace {

using namespace wide;

constexpr float kSmallestPeak = 1e-15f;  // blocks below are zero

// Grids tried: (max_quant + first + step * i) / span, i = 0 .. steps. absolute: |error| counts, not its square.
struct AffineSearch {
    float max_quant, first, step;
    int steps;
    bool absolute = false;
    bool allows_positive_low = false;  // a minimum above 0, where the format has a sign for it
};

// x ~ scale * q + low. grid and origin made the quants: q = nearest(grid * (x - origin)).
struct Affine {
    Floats scale, low, grid, origin;
};

template <int N>
Floats affine_error(const Floats (&x)[N], const Floats (&w)[N], const Floats (&q)[N], Floats scale, Floats low,
                    bool absolute) {
    Floats sum{};
    for (int i = 0; i < N; ++i) {
        const Floats error = scale * q[i] + low - x[i];
        sum += w[i] * (absolute ? magnitude(error) : error * error);
    }
    return sum;
}

template <int N>
Affine fit_affine(const Floats (&x)[N], const Floats (&w)[N], const AffineSearch& search) {
    Floats low = x[0], high = x[0], sum_w = w[0], sum_x = w[0] * x[0], q[N];
    for (int i = 1; i < N; ++i) {
        low = least(low, x[i]);
        high = most(high, x[i]);
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    if (!search.allows_positive_low) low = least(low, Floats{});
    const Ints is_flat = high == low;
    Affine best;
    best.low = best.origin = low;
    best.grid = search.max_quant / (high - low);
    best.scale = 1.0f / best.grid;
    for (int i = 0; i < N; ++i) q[i] = held(nearest(best.grid * (x[i] - low)), 0, search.max_quant);
    Floats least_error = affine_error(x, w, q, best.scale, low, search.absolute);
    for (int t = 0; t <= search.steps; ++t) {
        const Floats grid = (search.first + search.step * static_cast<float>(t) + search.max_quant) / (high - best.low);
        Floats sum_l{}, sum_l2{}, sum_xl{};
        for (int i = 0; i < N; ++i) {
            q[i] = held(nearest(grid * (x[i] - best.low)), 0, search.max_quant);
            const Floats weighted = w[i] * q[i];
            sum_l += weighted;
            sum_l2 += weighted * q[i];
            sum_xl += weighted * x[i];
        }
        const Floats determinant = sum_w * sum_l2 - sum_l * sum_l;
        Floats scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        Floats minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        if (!search.allows_positive_low) {
            const Ints is_above = minimum > 0.0f;
            minimum = choose(is_above, Floats{}, minimum);
            scale = choose(is_above, sum_xl / sum_l2, scale);
        }
        const Floats error = affine_error(x, w, q, scale, minimum, search.absolute);
        const Ints is_better = (determinant > 0.0f) & (error < least_error);
        least_error = choose(is_better, error, least_error);
        best.grid = choose(is_better, grid, best.grid);
        best.origin = choose(is_better, best.low, best.origin);
        best.scale = choose(is_better, scale, best.scale);
        best.low = choose(is_better, minimum, best.low);
    }
    best.scale = choose(is_flat, Floats{}, best.scale);
    best.low = choose(is_flat, low, best.low);
    best.grid = choose(is_flat, Floats{}, best.grid);
    best.origin = choose(is_flat, low, best.origin);
    return best;
}

// x ~ scale * q for q in -middle .. middle - 1. grid made the quants: q = nearest(grid * x); 0 for a block of zeros.
struct Symmetric {
    Floats scale, grid;
};

// The value of largest magnitude, with its sign; of equal ones the first.
template <int N>
Floats peak(const Floats (&x)[N]) {
    Floats found{}, largest{};
    for (int i = 0; i < N; ++i) {
        const Floats size = magnitude(x[i]);
        found = choose(size > largest, x[i], found);
        largest = most(largest, size);
    }
    return found;
}

template <int N>
void sums_on_grid(const Floats (&x)[N], const Floats (&w)[N], Floats grid, float middle, Floats& sum_lx,
                  Floats& sum_l2) {
    sum_lx = sum_l2 = Floats{};
    for (int i = 0; i < N; ++i) {
        const Floats q = held(nearest(grid * x[i]), -middle, middle - 1);
        sum_lx += w[i] * x[i] * q;
        sum_l2 += w[i] * q * q;
    }
}

template <int N>
Symmetric fit_symmetric(const Floats (&x)[N], const Floats (&w)[N], float middle) {
    const Floats largest = peak(x);
    Symmetric best;
    best.grid = -middle / largest;
    Floats sum_lx, sum_l2;
    sums_on_grid(x, w, best.grid, middle, sum_lx, sum_l2);
    best.scale = choose(sum_l2 != 0.0f, sum_lx / sum_l2, Floats{});
    Floats merit = best.scale * sum_lx;
    for (int t = -9; t <= 9; ++t) {
        if (t == 0) continue;
        const Floats grid = -(middle + 0.1f * static_cast<float>(t)) / largest;
        sums_on_grid(x, w, grid, middle, sum_lx, sum_l2);
        const Ints is_better = (sum_l2 > 0.0f) & (sum_lx * sum_lx > merit * sum_l2);
        best.scale = choose(is_better, sum_lx / sum_l2, best.scale);
        best.grid = choose(is_better, grid, best.grid);
        merit = choose(is_better, best.scale * sum_lx, merit);
    }
    const Ints is_zero = magnitude(largest) < kSmallestPeak;
    best.scale = choose(is_zero, Floats{}, best.scale);
    best.grid = choose(is_zero, Floats{}, best.grid);
    return best;
}

}  // namespace
}  // namespace kvarn::fit
