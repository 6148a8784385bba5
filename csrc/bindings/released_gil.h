// Other Python threads run while native code computes.
#pragma once
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace kvarn {

// A thread that comes back when the interpreter has ended is held for ever. Python would end it by unwinding its
// frames, which C++ answers by aborting the process: seen where a step took longer than the rest of the program.
class ReleasedGil {
public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;
    ~ReleasedGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }

private:
    PyThreadState* state_;
};

}  // namespace kvarn
