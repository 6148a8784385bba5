#include "runs.h"

#include <algorithm>

#include "../kernels/table.h"

namespace kvarn {

namespace {

// Keys at the start of two sequences that lie in the same blocks and that both see whole, in tiles.
int shared_keys(const BatchView& batch, int a, int b) {
    int limit = std::min(batch.context_lens[a], batch.context_lens[b]) / kKeyTile * kKeyTile;
    if (batch.shift(a) != 0 || batch.shift(b) != 0) return 0;
    int blocks = 0;
    while (blocks * kKVBlock < limit && batch.blocks(a)[blocks] == batch.blocks(b)[blocks]) ++blocks;
    return blocks * kKVBlock / kKeyTile * kKeyTile;
}

int num_rows(const BatchView& batch, int sequence) {
    return batch.row_starts[sequence + 1] - batch.row_starts[sequence];
}

// Single rows of sequences with a common beginning. A newcomer that shares much less than the others stays out.
QueryRun bundle(const BatchView& batch, int sequence, int max_rows) {
    QueryRun run{sequence, batch.row_starts[sequence], 1, 0};
    while (run.num_rows < max_rows && sequence + run.num_rows < batch.num_sequences) {
        int next = sequence + run.num_rows;
        int shared = num_rows(batch, next) == 1 ? shared_keys(batch, sequence, next) : 0;
        if (shared == 0 || 2 * shared < run.shared_keys) break;
        run.shared_keys = run.num_rows == 1 ? shared : std::min(run.shared_keys, shared);
        ++run.num_rows;
    }
    return run;
}

}  // namespace

std::vector<QueryRun> find_runs(const BatchView& batch, int num_threads) {
    int max_bundle = std::clamp(batch.num_sequences / num_threads, 1, kQueriesPerTask);
    std::vector<QueryRun> runs;
    for (int s = 0; s < batch.num_sequences;) {
        if (num_rows(batch, s) == 1) {
            runs.push_back(bundle(batch, s, max_bundle));
            s += runs.back().num_rows;
            continue;
        }
        for (int row = batch.row_starts[s]; row < batch.row_starts[s + 1]; row += kQueriesPerTask)
            runs.push_back({s, row, std::min(kQueriesPerTask, batch.row_starts[s + 1] - row), 0});
        ++s;
    }
    return runs;
}

}  // namespace kvarn
