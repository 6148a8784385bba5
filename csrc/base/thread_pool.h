// A pool that shares out small tasks and tolerates a descheduled thread.
//
// The caller works too. Tasks are claimed one at a time from one 64-bit ticket (generation, count, next), so a
// thread that is not running holds up nothing but the task it has already claimed. Idle workers spin briefly for
// the next region of the same step, then sleep.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace kvarn {

class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Run task(index, worker) for every index in [0, count); worker is in [0, num_threads).
    template <class Task>
    void run(int count, Task&& task) {
        if (count <= 0) return;
        if (count == 1 || workers_.empty()) {
            for (int i = 0; i < count; ++i) task(i, 0);
            return;
        }
        run_shared(
            count, [](void* context, int index, int worker) { (*static_cast<Task*>(context))(index, worker); },
            const_cast<void*>(static_cast<const void*>(&task)));
    }

    // Engines of one process take turns: hold this for a whole step.
    std::mutex& turn() { return turn_; }

private:
    using Invoke = void (*)(void* context, int index, int worker);

    void run_shared(int count, Invoke invoke, void* context);
    void work(int worker);
    bool claim(uint64_t& ticket);
    void do_tasks(int worker);
    void sleep_until_work(uint64_t seen_ticket);

    std::vector<std::thread> workers_;
    std::mutex turn_;
    Invoke invoke_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> num_done_{0};
    alignas(64) std::atomic<uint32_t> alarm_{0};
    std::atomic<int> num_sleeping_{0};
    std::atomic<bool> is_stopping_{false};
};

}  // namespace kvarn
