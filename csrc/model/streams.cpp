// Alternating updates: several residual streams, (streams, n, width), of which a layer computes one.
#include <algorithm>
#include <cmath>

#include "forward.h"

namespace kvarn {

namespace {

constexpr double kLeastSquare = 1e-5;

size_t offset(int row, int columns) { return static_cast<size_t>(row) * static_cast<size_t>(columns); }

double mean_square(const float* x, int n) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += double{x[i]} * double{x[i]};
    return sum / n;
}

// Make y as long as x.
void stretch(const float* x, int n, float* y) {
    const float factor =
        static_cast<float>(std::sqrt(mean_square(x, n)) / std::sqrt(std::max(mean_square(y, n), kLeastSquare)));
    for (int i = 0; i < n; ++i) y[i] *= factor;
}

float dot(const float* a, const float* b, int n) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += double{a[i]} * double{b[i]};
    return static_cast<float>(sum);
}

}  // namespace

void Model::split_streams(int n, const StepBuffers& buffers) const {
    const int width = spec_.width;
    const size_t size = offset(n, width);
    std::copy_n(buffers.x, size, buffers.streams);
    for (int s = 1; s < spec_.num_streams; ++s) {
        float* stream = buffers.streams + static_cast<size_t>(s) * size;
        Projection in{&(*plan_.streams_in)[static_cast<size_t>(s - 1)], stream, static_cast<size_t>(width), nullptr};
        project(compute(), prepare(compute(), buffers.quants, buffers.x, n, width, {&in, 1}), {&in, 1});
        for_rows(compute(), n,
                 [&](int row) { stretch(buffers.x + offset(row, width), width, stream + offset(row, width)); });
    }
}

// x = the mean of the first stream and of what the others are projected to.
void Model::merge_streams(int n, const StepBuffers& buffers) const {
    const int width = spec_.width;
    const size_t size = offset(n, width);
    std::copy_n(buffers.streams, size, buffers.x);
    for (int s = 1; s < spec_.num_streams; ++s) {
        Projection out{&(*plan_.streams_out)[static_cast<size_t>(s - 1)], buffers.result, static_cast<size_t>(width),
                       nullptr};
        const float* stream = buffers.streams + static_cast<size_t>(s) * size;
        project(compute(), prepare(compute(), buffers.quants, stream, n, width, {&out, 1}), {&out, 1});
        for_rows(compute(), n, [&](int row) {
            stretch(buffers.streams + offset(row, width), width, buffers.result + offset(row, width));
            kernels_.add(buffers.result + offset(row, width), width, buffers.x + offset(row, width));
        });
    }
    const float share = 1.0f / static_cast<float>(spec_.num_streams);
    for_rows(compute(), n, [&](int row) {
        for (int i = 0; i < width; ++i) buffers.x[offset(row, width) + static_cast<size_t>(i)] *= share;
    });
}

// modes (streams) = tanh(router(norm(x) / width)); work has room for a row.
void Model::stream_modes(const LayerPlan& layer, const float* x, float* work, float* modes) const {
    const int width = spec_.width;
    layer.stream_norm.apply(kernels_, x, width, work);
    const float scale = 1.0f / static_cast<float>(width);
    for (int s = 0; s < spec_.num_streams; ++s)
        modes[s] = std::tanh(dot(layer.stream_router + offset(s, width), work, width) * scale);
}

// stream i += sum over j of c[i, j] * stream j; x = the active one.
void Model::predict_streams(size_t index, int n, const StepBuffers& buffers) const {
    const LayerPlan& layer = plan_.layers[index];
    const int width = spec_.width, count = spec_.num_streams;
    const size_t size = offset(n, width);
    for_rows(compute(), n, [&](int row) {
        float* first = buffers.streams + offset(row, width);
        auto stream = [&](int s) { return first + static_cast<size_t>(s) * size; };
        float modes[kMaxStreams], mixing[kMaxStreams * kMaxStreams], before[kMaxStreams];
        stream_modes(layer, stream(spec_.active_stream), buffers.normed + offset(row, width), modes);
        for (int i = 0; i < count * count; ++i) mixing[i] = dot(layer.stream_predict + offset(i, count), modes, count);
        // Column by column: what all streams were is needed for each of them.
        for (int c = 0; c < width; ++c) {
            for (int s = 0; s < count; ++s) before[s] = stream(s)[c];
            for (int i = 0; i < count; ++i)
                for (int j = 0; j < count; ++j) stream(i)[c] += mixing[i * count + j] * before[j];
        }
        std::copy_n(stream(spec_.active_stream), width, buffers.x + offset(row, width));
    });
}

// All streams move by what the guess of the active one was wrong; all but the first take the layer's own input in.
void Model::correct_streams(size_t index, int n, const StepBuffers& buffers) const {
    const LayerPlan& layer = plan_.layers[index];
    const int width = spec_.width, count = spec_.num_streams;
    const size_t size = offset(n, width);
    for_rows(compute(), n, [&](int row) {
        float* x = buffers.x + offset(row, width);
        float* work = buffers.normed + offset(row, width);
        float* first = buffers.streams + offset(row, width);
        float modes[kMaxStreams];
        stream_modes(layer, x, work, modes);
        const float* guessed = first + static_cast<size_t>(spec_.active_stream) * size;
        for (int i = 0; i < width; ++i) work[i] = x[i] - guessed[i];
        for (int s = 0; s < count; ++s) {
            const float share = 1.0f + dot(layer.stream_correct + offset(s, count), modes, count);
            float* stream = first + static_cast<size_t>(s) * size;
            for (int i = 0; i < width; ++i) stream[i] += share * work[i];
        }
        for (int i = 0; i < width; ++i) x[i] = guessed[i] * (layer.stream_scale == nullptr ? 1 : layer.stream_scale[i]);
    });
    if (layer.per_layer_length > 0) {
        add_layer_input(index, n, buffers);
        for_rows(compute(), n, [&](int row) {
            for (int s = 1; s < count; ++s)
                kernels_.add(buffers.result + offset(row, width), width,
                             buffers.streams + static_cast<size_t>(s) * size + offset(row, width));
        });
    }
    if (index + 1 == plan_.layers.size()) merge_streams(n, buffers);
}

}  // namespace kvarn
