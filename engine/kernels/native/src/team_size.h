// Finds out while running whether the threads of a pool gain anything.
//
// On a machine that is busy with something else a second thread often costs more than it gains: the caller waits for
// chunks whose thread is not scheduled.  So single calls are made the other way from time to time, and compared with what
// calls of their size usually take.  Trials are rare, unless calls have become slower than they were: on an idle machine
// they cost less than a hundredth of the time.  One thread alone tries the team sooner than the other way round: it was
// often chosen for a moment's noise, or by small calls while a model was loaded, and where memory is what limits both,
// nobody would see that the second thread is missing.
#pragma once
#include <chrono>
#include <cstdint>

template <class Clock> class TeamSizeBy {
  public:
    explicit TeamSizeBy(bool team_possible) : team_(team_possible), possible_(team_possible) {}

    // Before a call that reads `bytes` of weights: whether the team should take part.
    bool use_team(int64_t bytes) {
        if (!possible_) return false;
        const auto now = Clock::now();
        if (!team_ && trial_calls_ == 0 && seconds_between(ended_, now) > kSilence) {
            // What was found belongs to another answer, or to loading.
            patience_ = kFewestAlone;
            patience_left_ = 0;
        }
        const int every = team_ ? kSpacing : 1;  // a team that has slept is tried in one go: waking up is not its speed
        other_way_ = patience_left_ == 0 && --spacing_left_ <= 0;
        if (other_way_) spacing_left_ = every;
        bytes_ = bytes < 1 ? 1 : bytes;
        begun_ = now;
        return team_ != other_way_;
    }

    // After that call.
    void done() {
        if (!possible_) return;
        ended_ = Clock::now();
        const double seconds = seconds_between(begun_, ended_);
        Usual &usual = usual_[size_class(bytes_)];
        const double expected = usual.now * static_cast<double>(bytes_);
        if (other_way_) {
            tried(seconds, expected);
            return;
        }
        const double rate = seconds / static_cast<double>(bytes_);
        usual.now = usual.now == 0 ? rate : usual.now + kWeight * (rate - usual.now);
        if (usual.before == 0) usual.before = rate;
        watch(seconds, usual.before * static_cast<double>(bytes_));
        if (patience_left_ > 0) --patience_left_;
    }

  private:
    // Seconds for a byte in calls of about one size: their moving average, and what it was at the last trial.
    struct Usual {
        double now = 0, before = 0;
    };
    static constexpr int kSizes = 64;
    static constexpr double kWeight = 1.0 / 16;
    static constexpr int kSpacing = 8, kTrialCalls = 16;
    static constexpr double kTrialSeconds = 0.02;  // calls of a prompt are long: fewer of them say enough
    static constexpr int kFewestTrialCalls = 4;
    // A core that has slept takes some milliseconds to become as fast as it can be.
    static constexpr int kWakingCalls = 24, kFewestWakingCalls = 4;
    static constexpr double kWakingSeconds = 0.01;
    // Calls between trials.
    static constexpr int kFirst = 256, kFewest = 2048, kMost = 16384, kFewestAlone = 128, kMostAlone = 4096;
    static constexpr double kSilence = 0.25;
    static constexpr int kWindow = 64;       // calls that are compared with those before
    static constexpr double kSlower = 1.25;  // makes a trial worth while at once
    static constexpr double kBetter = 1.05;

    static double seconds_between(typename Clock::time_point from, typename Clock::time_point to) {
        return std::chrono::duration<double>(to - from).count();
    }

    static int size_class(int64_t bytes) {
        int bits = 0;
        while (bits < kSizes - 1 && bytes >> bits > 1) ++bits;
        return bits;
    }

    // A call that was made the other way.
    void tried(double seconds, double expected) {
        ++trial_calls_;
        if (is_waking_) {
            waking_ += seconds;
            is_waking_ = trial_calls_ < kWakingCalls && (waking_ < kWakingSeconds || trial_calls_ < kFewestWakingCalls);
            return;
        }
        ++counted_calls_;
        if (expected > 0) {
            tried_ += seconds;
            expected_ += expected;
        } else if (counted_calls_ < kTrialCalls) {
            return;
        }
        const bool is_enough = counted_calls_ >= kTrialCalls || (tried_ > kTrialSeconds && counted_calls_ >= kFewestTrialCalls);
        if (!is_enough) return;
        if (tried_ * kBetter < expected_) {
            team_ = !team_;
            for (Usual &usual : usual_) usual.now = 0;  // of the way before
            patience_ = team_ ? kFewest : kFewestAlone;
        } else {
            const int fewest = team_ ? kFewest : kFewestAlone, most = team_ ? kMost : kMostAlone;
            patience_ = patience_ < fewest ? fewest : 2 * patience_ < most ? 2 * patience_ : most;
        }
        for (Usual &usual : usual_) usual.before = usual.now;
        patience_left_ = patience_;
        trial_calls_ = counted_calls_ = spacing_left_ = window_calls_ = 0;
        tried_ = expected_ = waking_ = window_ = window_before_ = 0;
        is_waking_ = !team_;
    }

    // A call that was made as usual.
    void watch(double seconds, double before) {
        window_ += seconds;
        window_before_ += before;
        if (++window_calls_ < kWindow) return;
        if (window_ > kSlower * window_before_) patience_left_ = 0;
        window_calls_ = 0;
        window_ = window_before_ = 0;
    }

    bool team_;
    const bool possible_;
    bool other_way_ = false;
    int patience_ = kFirst, patience_left_ = kFirst, spacing_left_ = 0;
    int trial_calls_ = 0, counted_calls_ = 0, window_calls_ = 0;
    bool is_waking_ = false;                  // a team in a trial, whose calls do not count yet
    double tried_ = 0, expected_ = 0;         // seconds in a trial
    double waking_ = 0;                       // seconds of a trial before those
    double window_ = 0, window_before_ = 0;  // seconds of the last calls
    int64_t bytes_ = 1;
    Usual usual_[kSizes];
    typename Clock::time_point begun_{}, ended_{};
};

using TeamSize = TeamSizeBy<std::chrono::steady_clock>;
