// Which queries of a step go through attention together.
#pragma once
#include <vector>

#include "batch.h"

namespace kvarn {

constexpr int kQueriesPerTask = 8;

// Up to kQueriesPerTask neighbouring rows: of one sequence, or one of each of several sequences that begin with the
// same blocks (shared_keys > 0). Those blocks are read once for all of them.
struct QueryRun {
    int sequence;  // of the first row
    int row_begin, num_rows;
    int shared_keys;  // whole tiles; 0: all rows are of one sequence

    int sequence_of(int i) const { return shared_keys > 0 ? sequence + i : sequence; }
};

// Runs in the order of rows; their cut never changes a result. At least num_threads runs, if there are as many rows.
std::vector<QueryRun> find_runs(const BatchView& batch, int num_threads);

}  // namespace kvarn
