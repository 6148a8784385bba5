// Layers with a state: the convolution before it and one step of a gated delta net, some columns at a time.
#pragma once
#include "math.h"

namespace kvarn::shared {
namespace {

template <class L>
void convolve(const float* const* rows, const float* w, int kernel, int n, bool silu, float* y) noexcept {
    for_vectors<L::kWidth>(n, [&](int c, auto extent) {
        auto sum = L::mul(L::load(rows[0] + c, extent), L::load(w + c, extent));
        for (int i = 1; i < kernel; ++i)
            sum = L::fma(L::load(rows[i] + c, extent), L::load(w + static_cast<size_t>(i) * n + c, extent), sum);
        if (silu) sum = L::div(sum, L::add(L::set(1.0f), exp<L>(L::negate(sum))));
        L::store(y + c, sum, extent);
    });
}

// kCount vectors of columns from c on, so that no fma waits for the one before.
template <class L, int kCount, class Extent>
inline void delta_columns(const float* S, const float* q, const float* k, const float* v, float decay, float beta,
                          int key_dim, int value_dim, int c, Extent extent, float* next, float* out) {
    using Floats = typename L::Floats;
    const Floats kept = L::set(decay);
    Floats sum[kCount];
    for (int j = 0; j < kCount; ++j) sum[j] = L::set(0);
    for (int i = 0; i < key_dim; ++i) {
        const Floats key = L::set(k[i]);
        for (int j = 0; j < kCount; ++j) {
            const float* at = S + static_cast<size_t>(i) * value_dim + c + L::kWidth * j;
            sum[j] = L::fma(key, L::mul(L::load(at, extent), kept), sum[j]);
        }
    }
    Floats error[kCount];
    for (int j = 0; j < kCount; ++j) {
        error[j] = L::mul(L::sub(L::load(v + c + L::kWidth * j, extent), sum[j]), L::set(beta));
        sum[j] = L::set(0);
    }
    for (int i = 0; i < key_dim; ++i) {
        const Floats key = L::set(k[i]), query = L::set(q[i]);
        for (int j = 0; j < kCount; ++j) {
            const size_t at = static_cast<size_t>(i) * value_dim + c + L::kWidth * j;
            const Floats state = L::fma(key, error[j], L::mul(L::load(S + at, extent), kept));
            L::store(next + at, state, extent);
            sum[j] = L::fma(query, state, sum[j]);
        }
    }
    for (int j = 0; j < kCount; ++j) L::store(out + c + L::kWidth * j, sum[j], extent);
}

template <class L>
void delta_step(const float* S, const float* q, const float* k, const float* v, float decay, float beta, int key_dim,
                int value_dim, float* next, float* out) noexcept {
    int c = 0;
    for (; c + 4 * L::kWidth <= value_dim; c += 4 * L::kWidth)
        delta_columns<L, 4>(S, q, k, v, decay, beta, key_dim, value_dim, c, Whole{}, next, out);
    for_vectors<L::kWidth>(value_dim - c, [&](int at, auto extent) {
        delta_columns<L, 1>(S, q, k, v, decay, beta, key_dim, value_dim, c + at, extent, next, out);
    });
}

}  // namespace
}  // namespace kvarn::shared
