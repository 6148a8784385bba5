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

void rotate(const RopeSpec& rope, const float* table_row, float* head) {
    size_t count = rope.inverse_frequencies.size();
    size_t stride = rope.is_interleaved ? 2 : 1;
    size_t partner = rope.is_interleaved ? 1 : count;
    for (size_t i = 0; i < count; ++i) {
        float& a = head[i * stride];
        float& b = head[i * stride + partner];
        float c = table_row[i], s = table_row[count + i];
        float rotated = a * c - b * s;
        b = a * s + b * c;
        a = rotated;
    }
}

}  // namespace kvarn
