// What works on one row of floats, a vector at a time; the end of a row is loaded as First.
//
// Beside what lanes.h lists, Lanes has for some of these
//   keep(x, extent)                zero in the lanes beyond
//   where_positive(condition, x)   x where the condition is above zero, zero elsewhere
//   sum_of_four(sums)              of all lanes, in the order of the set
//   DoubleSums                     eight partial sums in double, element i in sum i % 8
#pragma once
#include "math.h"
#include "quantize.h"
#include "recurrent.h"

namespace kvarn::shared {
namespace {

// Sum of term(x) in 32 interleaved partial sums.
template <class L, class Term>
inline float sum_of(const float* x, int n, Term term) {
    constexpr int kWidth = L::kWidth;
    static_assert(4 * kWidth == 32);
    typename L::Floats sum[4] = {L::set(0), L::set(0), L::set(0), L::set(0)};
    int i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 4; ++j) sum[j] = L::add(sum[j], term(L::load(x + i + kWidth * j)));
    for_vectors<kWidth>(
        n - i, [&](int at, auto extent) { L::accumulate(sum[0], L::keep(term(L::load(x + i + at, extent)), extent)); });
    return L::sum_of_four(sum);
}

template <class L>
void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept {
    using Floats = typename L::Floats;
    const float squares = sum_of<L>(x, n, [](Floats v) { return L::mul(v, v); });
    const Floats scale = L::set(1.0f / L::square_root(squares / static_cast<float>(n) + eps));
    for_vectors<L::kWidth>(n, [&](int i, auto extent) {
        const Floats normed = L::mul(L::load(x + i, extent), scale);
        L::store(y + i, L::mul(normed, L::load(w + i, extent)), extent);
    });
}

template <class L>
void layer_norm(const float* x, const float* w, const float* b, float eps, int n, float* y) noexcept {
    using Floats = typename L::Floats;
    const Floats mean = L::set(sum_of<L>(x, n, [](Floats v) { return v; }) / static_cast<float>(n));
    const float squares = sum_of<L>(x, n, [mean](Floats v) {
        const Floats centred = L::sub(v, mean);
        return L::mul(centred, centred);
    });
    const Floats scale = L::set(1.0f / L::square_root(squares / static_cast<float>(n) + eps));
    for_vectors<L::kWidth>(n, [&](int i, auto extent) {
        const Floats normed = L::mul(L::sub(L::load(x + i, extent), mean), scale);
        L::store(y + i, L::add(L::mul(normed, L::load(w + i, extent)), L::load(b + i, extent)), extent);
    });
}

template <class L>
void add(const float* x, int n, float* y) noexcept {
    for_vectors<L::kWidth>(n, [&](int i, auto extent) {
        L::store(y + i, L::add(L::load(y + i, extent), L::load(x + i, extent)), extent);
    });
}

template <class L, class Activation>
inline void activate(const float* gate, const float* up, int n, float* y, Activation activation) {
    for_vectors<L::kWidth>(n, [&](int i, auto extent) {
        const auto value = activation(L::load(gate + i, extent));
        L::store(y + i, L::mul(value, L::load(up + i, extent)), extent);
    });
}

template <class L>
void silu_mul(const float* gate, const float* up, int n, float* y) noexcept {
    activate<L>(gate, up, n, y,
                [](typename L::Floats g) { return L::div(g, L::add(L::set(1.0f), exp<L>(L::negate(g)))); });
}

// 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
template <class L>
void gelu_tanh_mul(const float* gate, const float* up, int n, float* y) noexcept {
    using Floats = typename L::Floats;
    activate<L>(gate, up, n, y, [](Floats g) {
        const Floats cube = L::fma(L::mul(g, g), L::set(0.044715f), L::set(1.0f));
        const Floats minus_2u = L::mul(L::mul(g, L::set(-1.59576912f)), cube);
        return L::div(g, L::add(L::set(1.0f), exp<L>(minus_2u)));
    });
}

template <class L>
void gelu(const float* x, int n, float* y) noexcept {
    for_vectors<L::kWidth>(n, [&](int i, auto extent) {
        const auto g = L::load(x + i, extent);
        const auto phi = one_plus_erf<L>(L::mul(g, L::set(0.707106781f)));
        L::store(y + i, L::mul(L::mul(g, L::set(0.5f)), phi), extent);
    });
}

template <class L>
void sigmoid_mul(const float* gate, const float* x, int n, float* y) noexcept {
    for_vectors<L::kWidth>(n, [&](int i, auto extent) {
        const auto below = L::add(L::set(1.0f), exp<L>(L::negate(L::load(gate + i, extent))));
        L::store(y + i, L::div(L::load(x + i, extent), below), extent);
    });
}

template <class L>
double sum_exp(const float* x, int n, float max) noexcept {
    typename L::DoubleSums sums;
    for_vectors<L::kWidth>(
        n, [&](int i, auto extent) { sums.add(L::keep(exp<L>(L::sub(L::load(x + i, extent), L::set(max))), extent)); });
    return sums.total();
}

template <class L>
void softmax_sums(const float* x, int n, float max, double* sums) noexcept {
    typename L::DoubleSums plain, weighted;
    for_vectors<L::kWidth>(n, [&](int i, auto extent) {
        const auto below = L::sub(L::load(x + i, extent), L::set(max));
        const auto e = L::keep(exp<L>(below), extent);
        plain.add(e);
        weighted.add(L::where_positive(e, L::mul(e, below)));  // 0 * -inf is not 0
    });
    sums[0] = plain.total();
    sums[1] = weighted.total();
}

// argmax is the folder's own.
template <class L>
constexpr KernelTable vector_kernels(decltype(KernelTable::argmax) argmax) {
    KernelTable t{};
    t.quantize_row = quantize_row<L>;
    t.rms_norm = rms_norm<L>;
    t.layer_norm = layer_norm<L>;
    t.add = add<L>;
    t.silu_mul = silu_mul<L>;
    t.gelu_tanh_mul = gelu_tanh_mul<L>;
    t.gelu = gelu<L>;
    t.sigmoid_mul = sigmoid_mul<L>;
    t.convolve = convolve<L>;
    t.delta_step = delta_step<L>;
    t.state_step = state_step<L>;
    t.selective_step = selective_step<L>;
    t.argmax = argmax;
    t.sum_exp = sum_exp<L>;
    t.softmax_sums = softmax_sums<L>;
    return t;
}

}  // namespace
}  // namespace kvarn::shared
