// What works on one row of floats, sixteen at a time.
#include "../shared/vector.h"

#include "../avx2/lanes.h"
#include "lanes.h"
#include "quantize.h"

namespace kvarn::avx512 {
namespace {

// Two sums take turns, so that one fma need not wait for the one before.
void rms_norm(const float* x, const float* w, float eps, int n, float* y) noexcept {
    __m512 sums[2] = {Lanes::set(0), Lanes::set(0)};
    int turn = 0;
    shared::for_vectors<Lanes::kWidth>(n, [&](int i, auto extent) {
        const __m512 value = Lanes::load(x + i, extent);
        sums[turn] = Lanes::fma(value, value, sums[turn]);
        turn ^= 1;
    });
    const float squares = Lanes::sum_lanes(Lanes::add(sums[0], sums[1]));
    const float root = avx2::Lanes::square_root(squares / static_cast<float>(n) + eps);
    const __m512 scale = Lanes::set(1.0f / root);
    shared::for_vectors<Lanes::kWidth>(n, [&](int i, auto extent) {
        const __m512 normed = Lanes::mul(Lanes::load(x + i, extent), scale);
        Lanes::store(y + i, Lanes::mul(normed, Lanes::load(w + i, extent)), extent);
    });
}

constexpr KernelTable make_vector_kernels() {
    KernelTable t{};
    t.quantize_row = quantize_row;
    t.rms_norm = rms_norm;
    t.add = shared::add<Lanes>;
    t.silu_mul = shared::silu_mul<Lanes>;
    t.gelu_tanh_mul = shared::gelu_tanh_mul<Lanes>;
    t.sigmoid_mul = shared::sigmoid_mul<Lanes>;
    t.convolve = shared::convolve<Lanes>;
    t.delta_step = shared::delta_step<Lanes>;
    t.state_step = shared::state_step<Lanes>;
    t.selective_step = shared::selective_step<Lanes>;
    return t;
}

}  // namespace

constinit const KernelTable vector_kernels = make_vector_kernels();

}  // namespace kvarn::avx512
