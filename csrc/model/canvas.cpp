// Canvases of random tokens: what their rows read of the last step.
#include "ffn.h"
#include "forward.h"

namespace kvarn {

// x = unit rms(x + feed-forward(norm(what was fed back))) for the rows of canvases; in a first step nothing is added.
void Model::condition_canvases(const BatchView& batch, const StepBuffers& buffers) const {
    const size_t width = static_cast<size_t>(spec_.width);
    std::vector<std::pair<size_t, const float*>> fed;
    std::vector<size_t> rows;
    for (int s = 0; s < batch.num_sequences; ++s) {
        const float* values = batch.feedback[static_cast<size_t>(s)].values;
        for (int row = batch.first_canvas_row(s); row < batch.row_starts[s + 1]; ++row) {
            rows.push_back(static_cast<size_t>(row));
            if (values == nullptr) continue;
            fed.emplace_back(rows.back(), values);
            values += width;
        }
    }
    if (!fed.empty()) {
        StepBuffers own = buffers;
        own.adapters = nullptr;  // they are of the layers
        const int n = static_cast<int>(fed.size());
        Activations in = reserve(own.quants, own.normed, n, spec_.width, first_products(*plan_.canvas, own));
        for_rows(compute(), n, [&](int i) {
            float* normed = own.normed + static_cast<size_t>(i) * width;
            plan_.canvas->ffn_in.apply(kernels_, fed[static_cast<size_t>(i)].second, spec_.width, normed);
            in.quantize(kernels_, i, 0, spec_.width);
        });
        feed_forward(compute(), *plan_.canvas, own, in, nullptr, nullptr);
        for_rows(compute(), n, [&](int i) {
            const float* added = own.result + static_cast<size_t>(i) * width;
            kernels_.add(added, spec_.width, buffers.x + fed[static_cast<size_t>(i)].first * width);
        });
    }
    for_rows(compute(), static_cast<int>(rows.size()), [&](int i) {
        float* x = buffers.x + rows[static_cast<size_t>(i)] * width;
        kernels_.rms_norm(x, plan_.unit.data(), spec_.canvas.norm.eps, spec_.width, x);
    });
}

}  // namespace kvarn
