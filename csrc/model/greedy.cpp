#include "greedy.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvarn {

void GreedyHead::choose(std::span<const HeadRow> rows, bool want_logprobs, std::span<Greedy> out,
                        std::span<const Top> tops) {
    std::lock_guard turn(model_.compute().pool.turn());
    num_best_ = want_logprobs && !tops.empty() ? static_cast<size_t>(std::max(1, tops[0].count)) : 1;
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
    arena_.reserve(QuantBuffers::arena_bytes(n, width) + Arena::padded(states * sizeof(float)) +
                   Arena::padded(all_floats * sizeof(float)) + 256);
    QuantBuffers buffers = QuantBuffers::take(arena_, n, width);
    float* values = arena_.take<float>(states);
    float* logits = arena_.take<float>(all_floats);
    logit_bytes_ = std::max(logit_bytes_, all_floats * sizeof(float));
    best_.assign(static_cast<size_t>(threads) * rows.size() * num_best_,
                 {-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()});
    if (want_logprobs) pieces_.resize(static_cast<size_t>(num_pieces()) * rows.size());

    gather_states(rows, width, values);
    Projection projection{&head, nullptr, 0, nullptr};
    ActTile tile = prepare(compute, buffers, values, n, width, {&projection, 1}).tile(0);
    MatmulFn matmul = compute.kernels.matmul[static_cast<int>(head.type)];
    compute.pool.run(num_pieces(), [&](int piece, int worker) {
        float* own = logits + static_cast<size_t>(worker) * piece_floats;
        int group = piece * (kVocabPiece / kLanes), num_groups = std::min(kVocabPiece / kLanes, head.groups() - group);
        matmul(head.packed + static_cast<size_t>(group) * head.group_bytes(), tile, own, kVocabPiece,
               head.rows - group * kLanes, 0, num_groups);
        reduce(rows, piece, worker, want_logprobs, own);
    });
    for (size_t row = 0; row < rows.size(); ++row) {
        std::span<Candidate> best = best_of(0, row, rows.size());
        out[row] = merge(row, rows.size(), want_logprobs, best);
        if (!want_logprobs || tops.empty() || out[row].id == Sampler::kNoToken) continue;
        for (int i = 0; i < tops[row].count; ++i) {
            const Candidate& c = best[static_cast<size_t>(i)];
            tops[row].ids[i] = c.id;
            double below = static_cast<double>(c.logit) - static_cast<double>(best[0].logit);
            tops[row].logprobs[i] = static_cast<float>(below + out[row].logprob);
        }
    }
}

void GreedyHead::reduce(std::span<const HeadRow> rows, int piece, int worker, bool want_logprobs, float* logits) {
    const KernelTable& kernels = model_.compute().kernels;
    int first_id = piece * kVocabPiece, n = std::min(kVocabPiece, model_.spec().vocab_size - first_id);
    float cap = model_.spec().head_softcap;
    for (size_t row = 0; row < rows.size(); ++row) {
        float* own = logits;
        logits += static_cast<size_t>(rows[row].num_states()) * kVocabPiece;
        if (cap != 0.0f)
            for (float* state = own; state < logits; state += kVocabPiece) cap_logits(state, n, cap);
        if (rows[row].partner != nullptr) guide(own, own + kVocabPiece, rows[row].guidance, n);
        int index = 0;
        float largest = 0;
        kernels.argmax(own, n, &index, &largest);
        std::span<Candidate> best = best_of(worker, row, rows.size());
        if (Candidate{largest, first_id + index} > best.back()) remember(best, own, n, first_id, index);
        if (!want_logprobs) continue;
        Piece& result = pieces_[static_cast<size_t>(piece) * rows.size() + row];
        result.largest = largest;
        kernels.softmax_sums(own, n, largest, result.sums);
    }
}

// Put a candidate in its place, if it has one; the best stay sorted.
void GreedyHead::insert(std::span<Candidate> best, Candidate candidate) {
    if (!(candidate > best.back())) return;
    size_t at = best.size() - 1;
    for (; at > 0 && candidate > best[at - 1]; --at) best[at] = best[at - 1];
    best[at] = candidate;
}

void GreedyHead::remember(std::span<Candidate> best, const float* logits, int n, int first_id, int index) {
    if (best.size() == 1) return insert(best, {logits[index], first_id + index});
    for (int i = 0; i < n; ++i) insert(best, {logits[i], first_id + i});
}

// The best of all workers into those of the first; the sums of all pieces from left to right.
Greedy GreedyHead::merge(size_t row, size_t num_rows, bool want_logprobs, std::span<Candidate> best) {
    for (int worker = 1; worker < model_.compute().pool.num_threads(); ++worker)
        for (const Candidate& candidate : best_of(worker, row, num_rows)) insert(best, candidate);
    Greedy found;
    if (!std::isfinite(best[0].logit)) return found;
    found.id = best[0].id;
    if (!want_logprobs) return found;
    double total = 0, weighted = 0, top = static_cast<double>(best[0].logit);
    for (int piece = 0; piece < num_pieces(); ++piece) {
        const Piece& part = pieces_[static_cast<size_t>(piece) * num_rows + row];
        double below = static_cast<double>(part.largest) - top, factor = std::exp(below);
        if (!(factor > 0)) continue;
        total += part.sums[0] * factor;
        weighted += (part.sums[1] + part.sums[0] * below) * factor;
    }
    found.logprob = -std::log(total);
    found.entropy = std::max(0.0, std::log(total) - weighted / total);
    return found;
}

}  // namespace kvarn
