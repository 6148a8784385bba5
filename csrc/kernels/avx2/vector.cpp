// Everything that works on one row of floats.
#include "../shared/vector.h"

#include "lanes.h"

namespace kvarn::avx2 {
namespace {

// Each lane keeps its first largest; the lowest index among equal lanes wins. NaN compares false and is passed over.
void argmax(const float* x, int n, int* index, float* value) noexcept {
    __m256 best = Lanes::set(-__builtin_inff());
    __m256i best_at = _mm256_setzero_si256();
    shared::for_vectors<Lanes::kWidth>(n, [&](int i, auto extent) {
        const __m256 values = Lanes::load(x + i, extent);
        const __m256 greater = Lanes::keep(_mm256_cmp_ps(values, best, _CMP_GT_OQ), extent);
        const __m256i at = _mm256_add_epi32(_mm256_set1_epi32(i), Lanes::numbers());
        best = _mm256_blendv_ps(best, values, greater);
        best_at = _mm256_blendv_epi8(best_at, at, _mm256_castps_si256(greater));
    });
    alignas(32) float values[8];
    alignas(32) int indices[8];
    _mm256_store_ps(values, best);
    _mm256_store_si256(reinterpret_cast<__m256i*>(indices), best_at);
    *index = indices[0];
    *value = values[0];
    for (int lane = 1; lane < 8; ++lane)
        if (values[lane] > *value || (values[lane] == *value && indices[lane] < *index)) {
            *index = indices[lane];
            *value = values[lane];
        }
}

}  // namespace

constinit const KernelTable vector_kernels = shared::vector_kernels<Lanes>(argmax);

}  // namespace kvarn::avx2
