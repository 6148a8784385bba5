#include "timed.h"

#include <array>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "../base/ticks.h"
#include "entries.h"

namespace kvarn {
namespace {

#define KVARN_NAME(entry) entry##_index,
enum Index : size_t { first_entry = kNumTypes - 1, KVARN_ENTRIES(KVARN_NAME) num_entries };
#undef KVARN_NAME

using Times = std::array<KernelTime, num_entries>;

std::mutex guard;
const KernelTable* base_table = nullptr;
std::deque<Times> times_of_threads;  // never shrinks: threads of a pool live as long as the process

Times& times_of_this_thread() {
    thread_local Times* mine = nullptr;
    if (mine == nullptr) {
        std::lock_guard lock(guard);
        mine = &times_of_threads.emplace_back();
    }
    return *mine;
}

class Stopwatch {
public:
    explicit Stopwatch(size_t index) : index_(index), begin_(ticks()) {}
    ~Stopwatch() {
        const uint64_t end = ticks();
        KernelTime& time = times_of_this_thread()[index_];
        time.calls += 1;
        time.ticks += end - begin_;
    }

private:
    const size_t index_;
    const uint64_t begin_;
};

template <size_t index, auto entry>
struct Timed;

template <size_t index, class Result, class... Args, Result (*KernelTable::*entry)(Args...) noexcept>
struct Timed<index, entry> {
    static Result call(Args... args) noexcept {
        Stopwatch watch(index);
        return (base_table->*entry)(args...);
    }
};

template <size_t type>
void timed_matmul(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin,
                  int group_end) noexcept {
    Stopwatch watch(type);
    base_table->matmul[type](packed, tile, out, out_stride, rows, group_begin, group_end);
}

template <size_t... types>
void set_matmuls(KernelTable& table, std::index_sequence<types...>) {
    ((table.matmul[types] = table.matmul[types] == nullptr ? nullptr : timed_matmul<types>), ...);
}

KernelTable timed(const KernelTable& base) {
    KernelTable table = base;
    set_matmuls(table, std::make_index_sequence<kNumTypes>());
#define KVARN_TIME(entry) \
    if (base.entry != nullptr) table.entry = Timed<entry##_index, &KernelTable::entry>::call;
    KVARN_ENTRIES(KVARN_TIME)
#undef KVARN_TIME
    return table;
}

}  // namespace

const KernelTable& timed_table(const KernelTable& base) {
    std::lock_guard lock(guard);
    if (base_table != nullptr && base_table != &base)
        throw std::invalid_argument(std::string("kernels of table '") + base_table->name + "' are timed already");
    base_table = &base;
    static const KernelTable table = timed(base);
    return table;
}

std::map<std::string, KernelTime> kernel_times() {
    std::map<std::string, KernelTime> found;
    std::lock_guard lock(guard);
    auto add = [&](const char* name, size_t index) {
        for (const Times& times : times_of_threads) {
            found[name].calls += times[index].calls;
            found[name].ticks += times[index].ticks;
        }
    };
#define KVARN_MATMUL(type) add("matmul_" #type, static_cast<size_t>(Type::type));
    KVARN_FLOAT_TYPES(KVARN_MATMUL)
    KVARN_QUANTIZED_TYPES(KVARN_MATMUL)
#undef KVARN_MATMUL
#define KVARN_ENTRY(entry) add(#entry, entry##_index);
    KVARN_ENTRIES(KVARN_ENTRY)
#undef KVARN_ENTRY
    return found;
}

}  // namespace kvarn
