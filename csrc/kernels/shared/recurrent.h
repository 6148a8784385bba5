// Layers with a state: the convolution before it and one step of each kind, some columns at a time.
#pragma once
#include "math.h"

namespace kvarn::shared {
namespace {

template <class L>
void convolve(const float* const* rows, const float* w, const float* bias, int kernel, int n, bool silu,
              float* y) noexcept {
    for_vectors<L::kWidth>(n, [&](int c, auto extent) {
        auto sum = L::mul(L::load(rows[0] + c, extent), L::load(w + c, extent));
        for (int i = 1; i < kernel; ++i)
            sum = L::fma(L::load(rows[i] + c, extent), L::load(w + static_cast<size_t>(i) * n + c, extent), sum);
        if (bias != nullptr) sum = L::add(sum, L::load(bias + c, extent));
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

// kCount vectors of columns from c on; decay(i, j) is what the state of key i keeps of the j-th of them.
template <class L, int kCount, class Extent, class Decay>
inline void state_columns(const float* S, const float* q, const float* k, const typename L::Floats* added, int key_dim,
                          int value_dim, int c, Extent extent, Decay decay, float* next, float* out) {
    using Floats = typename L::Floats;
    Floats sum[kCount];
    for (int j = 0; j < kCount; ++j) sum[j] = L::set(0);
    for (int i = 0; i < key_dim; ++i) {
        const Floats key = L::set(k[i]), query = L::set(q[i]);
        for (int j = 0; j < kCount; ++j) {
            const size_t at = static_cast<size_t>(i) * value_dim + c + L::kWidth * j;
            const Floats state = L::fma(key, added[j], L::mul(L::load(S + at, extent), decay(at, j)));
            L::store(next + at, state, extent);
            sum[j] = L::fma(query, state, sum[j]);
        }
    }
    for (int j = 0; j < kCount; ++j) L::store(out + c + L::kWidth * j, sum[j], extent);
}

template <class L, int kCount, class Extent>
inline void state_step_columns(const float* S, const float* q, const float* k, const float* v, float decay, float step,
                               int key_dim, int value_dim, int c, Extent extent, float* next, float* out) {
    using Floats = typename L::Floats;
    Floats added[kCount];
    for (int j = 0; j < kCount; ++j) added[j] = L::mul(L::load(v + c + L::kWidth * j, extent), L::set(step));
    const Floats kept = L::set(decay);
    state_columns<L, kCount>(
        S, q, k, added, key_dim, value_dim, c, extent, [&](size_t, int) { return kept; }, next, out);
}

template <class L>
void state_step(const float* S, const float* q, const float* k, const float* v, float decay, float step, int key_dim,
                int value_dim, float* next, float* out) noexcept {
    int c = 0;
    for (; c + 4 * L::kWidth <= value_dim; c += 4 * L::kWidth)
        state_step_columns<L, 4>(S, q, k, v, decay, step, key_dim, value_dim, c, Whole{}, next, out);
    for_vectors<L::kWidth>(value_dim - c, [&](int at, auto extent) {
        state_step_columns<L, 1>(S, q, k, v, decay, step, key_dim, value_dim, c + at, extent, next, out);
    });
}

template <class L>
void selective_step(const float* S, const float* a, const float* q, const float* k, const float* v, const float* steps,
                    int key_dim, int value_dim, float* next, float* out) noexcept {
    using Floats = typename L::Floats;
    for_vectors<L::kWidth>(value_dim, [&](int c, auto extent) {
        const Floats step = L::load(steps + c, extent);
        const Floats added = L::mul(L::load(v + c, extent), step);
        state_columns<L, 1>(
            S, q, k, &added, key_dim, value_dim, c, extent,
            [&](size_t at, int) { return exp<L>(L::mul(L::load(a + at, extent), step)); }, next, out);
    });
}

}  // namespace
}  // namespace kvarn::shared
