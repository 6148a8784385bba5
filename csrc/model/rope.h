// Rotary positions: cosines and sines of a step's positions, computed once for each distinct rope of the model.
#pragma once
#include "project.h"
#include "spec.h"

namespace kvarn {

// table is (n, 2 * frequencies): all cosines of a row, then its sines, both times the rope's magnitude.
void fill_rope_table(const Compute& compute, const RopeSpec& rope, const int32_t* positions, int n, float* table);

// Rotate one head in place with one row of the table.
void rotate(const RopeSpec& rope, const float* table_row, float* head);

}  // namespace kvarn
