// The rows of canvases: what is chosen there, and the mean of the embeddings, which the next step reads.
//
// The mean is added up in fixed pieces of the vocabulary from left to right, each row alone. A piece is unpacked once
// for the rows that are in memory together, as the second matrix of a low-rank pair: its kernel is the product.
#include <algorithm>
#include <cmath>

#include "choose.h"

namespace kvarn {

namespace {

constexpr int kPieceIds = 64, kPieceColumns = 256;  // whole blocks of every type

// Probabilities below so much of the largest are left out: all of a vocabulary of 2^20 together are below rounding.
constexpr float kLeastLog = -31.0f;

// Columns [begin, end) of ids [first, first + ids) as (columns / 8, ids, 8); zeros for ids that no row has.
void unpack_piece(const Matrix& table, const float* weights, int count, int first, int ids, int begin, int end,
                  float* row, float* piece) {
    const size_t vocab = static_cast<size_t>(table.rows), stride = static_cast<size_t>(ids) * kLanes;
    for (int j = 0; j < ids; ++j) {
        bool is_needed = false;
        for (int t = 0; t < count && !is_needed; ++t)
            is_needed = weights[static_cast<size_t>(t) * vocab + static_cast<size_t>(first + j)] != 0.0f;
        if (is_needed) unpack_columns(table.type, table.packed, table.columns, first + j, begin, end, row);
        else std::fill_n(row, end - begin, 0.0f);
        for (int c = 0; c < end - begin; ++c)
            piece[static_cast<size_t>(c / kLanes) * stride + static_cast<size_t>(j * kLanes + c % kLanes)] = row[c];
    }
}

}  // namespace

void Chooser::sample_canvas(std::span<const HeadRow> rows, std::span<const RowSampling> params, int32_t* ids,
                            const CanvasResults& out) {
    const size_t width = static_cast<size_t>(model_.spec().width);
    const int vocab = vocab_size();
    std::fill_n(out.means, rows.size() * width, 0.0f);
    const auto choose = [&](size_t row, float* logits, int worker) {
        ids[row] = is_finite(rows[row]) ? sampler_.choose(params[row], logits, worker) : Sampler::kNoToken;
        out.best_ids[row] = Sampler::kNoToken, out.entropy[row] = 0;
        if (ids[row] == Sampler::kNoToken) return std::fill_n(logits, vocab, 0.0f), void();
        int best = 0;
        float largest = 0;
        model_.compute().kernels.argmax(logits, vocab, &best, &largest);
        const Softmax softmax = sampler_.softmax(logits);
        out.best_ids[row] = best, out.entropy[row] = static_cast<float>(softmax.entropy);
        const float least = largest + kLeastLog, log_total = static_cast<float>(softmax.log_total);
        for (int i = 0; i < vocab; ++i) logits[i] = logits[i] < least ? 0.0f : std::exp(logits[i] - log_total);
    };
    head_.for_each_row(rows, choose, [&](size_t first, int count, const float* weights) {
        add_means(weights, count, out.means + first * width);
    });
}

// means (count, width) += weights (count, vocabulary) x embedding
void Chooser::add_means(const float* weights, int count, float* means) {
    const Matrix& table = *model_.plan().embedding;
    const Compute compute = model_.compute();
    const size_t vocab = static_cast<size_t>(table.rows), width = static_cast<size_t>(table.columns);
    constexpr size_t kPiece = static_cast<size_t>(kPieceIds) * kPieceColumns;
    for (std::vector<float>& one : plain_) one.resize(std::max(one.size(), kPiece + kPieceColumns));
    compute.pool.run((table.columns + kPieceColumns - 1) / kPieceColumns, [&](int chunk, int worker) {
        const int begin = chunk * kPieceColumns, end = std::min(begin + kPieceColumns, table.columns);
        float *piece = plain_[static_cast<size_t>(worker)].data(), *row = piece + kPiece;
        for (int first = 0; first < table.rows; first += kPieceIds) {
            const int ids = std::min(kPieceIds, table.rows - first);
            bool is_unpacked = false;
            for (int t = 0; t < count; ++t) {
                const float* own = weights + static_cast<size_t>(t) * vocab + static_cast<size_t>(first);
                if (std::all_of(own, own + ids, [](float weight) { return weight == 0.0f; })) continue;
                if (!is_unpacked) unpack_piece(table, weights, count, first, ids, begin, end, row, piece);
                is_unpacked = true;
                float* to = means + static_cast<size_t>(t) * width + static_cast<size_t>(begin);
                compute.kernels.low_rank_add_f32(reinterpret_cast<const uint8_t*>(piece), own, ids, end - begin, to);
            }
        }
        for (int t = 0; t < count; ++t)
            for (int c = begin; c < end; ++c)
                means[static_cast<size_t>(t) * width + static_cast<size_t>(c)] *= model_.spec().embedding_scale;
    });
}

}  // namespace kvarn
