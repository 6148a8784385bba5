#include "greedy.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvarn {

void GreedyHead::choose(std::span<const HeadRow> rows, bool want_logprobs, std::span<Greedy> out,
                        std::span<const Top> tops) {
    std::lock_guard turn(model_.compute().pool.turn());
    num_best_ = want_logprobs && !tops.empty() ? static_cast<size_t>(tops[0].count) : 0;
    for (size_t first = 0; first < rows.size();) {
        size_t count = static_cast<size_t>(rows_of_pass(rows, first, kTileTokens));
        pass(rows.subspan(first, count), want_logprobs, out.subspan(first, count),
             tops.empty() ? tops : tops.subspan(first, count));
        first += count;
    }
}

void GreedyHead::pass(std::span<const HeadRow> rows, bool want_logprobs, std::span<Greedy> out,
                      std::span<const Top> tops) {
    Compute compute = model_.compute();
    const Matrix& head = *model_.plan().head;
    int width = model_.spec().width, n = 0, threads = compute.pool.num_threads();
    for (const HeadRow& row : rows) n += row.num_states();
    size_t states = static_cast<size_t>(n) * static_cast<size_t>(width);
    size_t piece_floats = static_cast<size_t>(n) * kVocabPiece,
           all_floats = piece_floats * static_cast<size_t>(threads);
    arena_.reserve(QuantBuffers::arena_bytes(compute.kernels, n, width) + Arena::padded(states * sizeof(float)) +
                   Arena::padded(all_floats * sizeof(float)) + 256);
    QuantBuffers buffers = QuantBuffers::take(arena_, compute.kernels, n, width);
    float* values = arena_.take<float>(states);
    float* logits = arena_.take<float>(all_floats);
    logit_bytes_ = std::max(logit_bytes_, all_floats * sizeof(float));
    found_.assign(static_cast<size_t>(threads) * rows.size() * (1 + num_best_),
                  {-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max(), 0});
    if (want_logprobs) pieces_.resize(static_cast<size_t>(num_pieces()) * rows.size());

    gather_states(rows, width, values);
    Projection projection{&head, nullptr, 0, nullptr};
    ActTile tile = prepare(compute, buffers, values, n, width, {&projection, 1}).tile(0);
    adapt_head(model_, rows, values, low_rank_);
    MatmulFn matmul = compute.kernels.matmul[static_cast<int>(head.type)];
    compute.pool.run(num_pieces(), Claim::neighbours, [&](int piece, int worker) {
        float* own = logits + static_cast<size_t>(worker) * piece_floats;
        int group = piece * (kVocabPiece / kLanes), num_groups = std::min(kVocabPiece / kLanes, head.groups() - group);
        matmul(head.packed + static_cast<size_t>(group) * head.group_bytes(), tile, own, kVocabPiece,
               head.rows - group * kLanes, 0, num_groups);
        const int num_rows = std::min(kVocabPiece, head.rows - group * kLanes);
        for (int state = 0; state < n && !low_rank_.empty(); ++state)
            low_rank_.add_to(compute.kernels, state, group, num_rows, own + static_cast<size_t>(state) * kVocabPiece);
        reduce(rows, piece, worker, want_logprobs, own);
    });
    for (size_t row = 0; row < rows.size(); ++row) {
        std::span<Candidate> found = found_by(0, row, rows.size());
        out[row] = merge(row, rows.size(), want_logprobs, found);
        if (num_best_ == 0 || out[row].id == Sampler::kNoToken) continue;
        for (int i = 0; i < tops[row].count; ++i) {
            const Candidate& candidate = found[1 + static_cast<size_t>(i)];
            tops[row].ids[i] = candidate.id;
            tops[row].logprobs[i] =
                static_cast<float>(static_cast<double>(candidate.plain) - out[row].softmax.log_total);
        }
    }
}

void GreedyHead::reduce(std::span<const HeadRow> rows, int piece, int worker, bool want_logprobs, float* logits) {
    SoftmaxPiece unwanted;
    for (size_t row = 0; row < rows.size(); ++row) {
        SoftmaxPiece& sums = want_logprobs ? pieces_[static_cast<size_t>(piece) * rows.size() + row] : unwanted;
        reduce_row(rows[row], piece, want_logprobs, logits, found_by(worker, row, rows.size()), sums);
        logits += static_cast<size_t>(rows[row].num_states()) * kVocabPiece;
    }
}

void GreedyHead::reduce_row(const HeadRow& row, int piece, bool want_logprobs, float* logits,
                            std::span<Candidate> found, SoftmaxPiece& sums) {
    const KernelTable& kernels = model_.compute().kernels;
    int first_id = piece * kVocabPiece, n = std::min(kVocabPiece, model_.spec().vocab_size - first_id);
    for (int state = 0; state < row.num_states(); ++state)
        finish_logits(model_, first_id, n, logits + state * kVocabPiece);
    if (row.partner != nullptr) guide(logits, logits + kVocabPiece, row.guidance, n);
    Candidate largest = largest_logit(kernels, logits, n, first_id);
    if (want_logprobs) {
        sums.largest = largest.logit;
        kernels.softmax_sums(logits, n, largest.logit, sums.sums);
    }
    std::span<Candidate> best = found.subspan(1);
    if (!best.empty() && largest > best.back())
        for (int i = 0; i < n; ++i) insert(best, {logits[i], first_id + i, logits[i]});
    insert(found.first(1), row.bias_ids.empty() ? largest : largest_biased_logit(kernels, row, logits, n, first_id));
}

GreedyHead::Candidate GreedyHead::largest_logit(const KernelTable& kernels, const float* logits, int n, int first_id) {
    int index = 0;
    float largest = 0;
    kernels.argmax(logits, n, &index, &largest);
    return {largest, first_id + index, largest};
}

// Changes logits.
GreedyHead::Candidate GreedyHead::largest_biased_logit(const KernelTable& kernels, const HeadRow& row, float* logits,
                                                       int n, int first_id) {
    auto for_biases = [&](auto use) {
        for (size_t i = 0; i < row.bias_ids.size(); ++i)
            if (int at = row.bias_ids[i] - first_id; at >= 0 && at < n) use(at, row.bias_values[i]);
    };
    int num_biased = 0;
    for_biases([&](int, float) { ++num_biased; });
    if (num_biased == 0) return largest_logit(kernels, logits, n, first_id);
    float plain[kVocabPiece];
    std::copy_n(logits, n, plain);
    for_biases([&](int at, float bias) { logits[at] += bias; });
    Candidate found = largest_logit(kernels, logits, n, first_id);
    found.plain = plain[found.id - first_id];
    return found;
}

// Put a candidate in its place, if it has one; the best stay sorted.
void GreedyHead::insert(std::span<Candidate> best, Candidate candidate) {
    if (!(candidate > best.back())) return;
    size_t at = best.size() - 1;
    for (; at > 0 && candidate > best[at - 1]; --at) best[at] = best[at - 1];
    best[at] = candidate;
}

// What all workers found into what the first found; the sums of all pieces from left to right.
Greedy GreedyHead::merge(size_t row, size_t num_rows, bool want_logprobs, std::span<Candidate> found) {
    for (int worker = 1; worker < model_.compute().pool.num_threads(); ++worker) {
        std::span<Candidate> theirs = found_by(worker, row, num_rows);
        insert(found.first(1), theirs[0]);
        for (size_t i = 1; i < theirs.size(); ++i) insert(found.subspan(1), theirs[i]);
    }
    Greedy result;
    if (!std::isfinite(found[0].logit)) return result;
    result.id = found[0].id;
    if (!want_logprobs) return result;
    result.softmax = merge_pieces(num_pieces(), [&](int piece) -> const SoftmaxPiece& {
        return pieces_[static_cast<size_t>(piece) * num_rows + row];
    });
    result.logprob = static_cast<double>(found[0].plain) - result.softmax.log_total;
    return result;
}

}  // namespace kvarn
