// Everything that works on one row of floats.
#include "../shared/vector.h"

#include "lanes.h"

namespace kvarn::neon {
namespace {

// Each lane keeps its first largest; the lowest index among equal lanes wins. NaN compares false and is passed over.
void argmax(const float* x, int n, int* index, float* value) noexcept {
    float32x4_t best = vdupq_n_f32(-__builtin_inff());
    int32x4_t best_at = vdupq_n_s32(0);
    const auto take_better = [&](int i, float32x4_t values, uint32x4_t lanes) {
        const uint32x4_t greater = vandq_u32(vcgtq_f32(values, best), lanes);
        best = vbslq_f32(greater, values, best);
        best_at = vbslq_s32(greater, vaddq_s32(vdupq_n_s32(i), Lanes::numbers()), best_at);
    };
    int i = 0;
    for (; i + 4 <= n; i += 4) take_better(i, vld1q_f32(x + i), vdupq_n_u32(~0u));
    if (i < n) take_better(i, Lanes::load(x + i, First{n - i}).low, vcltq_s32(Lanes::numbers(), vdupq_n_s32(n - i)));
    *value = vmaxvq_f32(best);
    const uint32x4_t is_largest = vceqq_f32(best, vdupq_n_f32(*value));
    *index = vminvq_s32(vbslq_s32(is_largest, best_at, vdupq_n_s32(0x7fffffff)));
}

}  // namespace

constinit const KernelTable vector_kernels = shared::vector_kernels<Lanes>(argmax);

}  // namespace kvarn::neon
