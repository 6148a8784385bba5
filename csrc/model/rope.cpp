#include "rope.h"

#include <cmath>

namespace kvarn {

void fill_rope_table(const Compute& compute, const RopeSpec& rope, const int32_t* positions, int n, float* table) {
    size_t count = rope.inverse_frequencies.size();
    for_rows(compute, n, [&](int row) {
        float* cosines = table + static_cast<size_t>(row) * 2 * count;
        for (size_t i = 0; i < count; ++i) {
            double angle = static_cast<double>(positions[row]) * static_cast<double>(rope.inverse_frequencies[i]);
            cosines[i] = static_cast<float>(std::cos(angle) * static_cast<double>(rope.magnitude));
            cosines[count + i] = static_cast<float>(std::sin(angle) * static_cast<double>(rope.magnitude));
        }
    });
}

namespace {

// Strides that the compiler knows: it then rotates several pairs at once.
template <size_t kStride>
void rotate_pairs(const float* __restrict cosines, const float* __restrict sines, size_t count, float* __restrict first,
                  float* __restrict second) {
    for (size_t i = 0; i < count; ++i) {
        float a = first[i * kStride], b = second[i * kStride];
        first[i * kStride] = a * cosines[i] - b * sines[i];
        second[i * kStride] = a * sines[i] + b * cosines[i];
    }
}

}  // namespace

void rotate(const RopeSpec& rope, const float* table_row, float* head) {
    size_t count = rope.inverse_frequencies.size();
    if (rope.is_interleaved) rotate_pairs<2>(table_row, table_row + count, count, head, head + 1);
    else rotate_pairs<1>(table_row, table_row + count, count, head, head + count);
}

}  // namespace kvarn
