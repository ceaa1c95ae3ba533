// Which way a pool goes on machines that become busy and quiet again, by a clock that stands still between calls.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "team_size.h"

namespace {

struct Clock {
    using duration = std::chrono::nanoseconds;
    using time_point = std::chrono::time_point<Clock, duration>;
    static time_point time;
    static time_point now() { return time; }
};
Clock::time_point Clock::time{std::chrono::seconds(1)};

using Size = TeamSizeBy<Clock>;
constexpr int64_t kBytes = 1 << 20;

// What `calls` calls took, and the part of them that a team made, where a call takes so many microseconds either way.
struct Made {
    double by_team, us;
};
Made made(Size &size, int calls, int team_us, int alone_us) {
    int by_team = 0;
    int64_t us = 0;
    for (int call = 0; call < calls; ++call) {
        const bool team = size.use_team(kBytes << call % 3);  // a layer's calls differ
        const int64_t takes = (team ? team_us : alone_us) * (1 << call % 3);
        by_team += team;
        us += takes;
        Clock::time += std::chrono::microseconds(takes);
        size.done();
    }
    return {static_cast<double>(by_team) / calls, static_cast<double>(us)};
}
double by_team(Size &size, int calls, int team_us, int alone_us) { return made(size, calls, team_us, alone_us).by_team; }

void require(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "busy_machine: %s\n", what);
    std::exit(1);
}

}  // namespace

int main() {
    Size costs(true);
    const double least = made(costs, 3000, 100, 100).us;
    Size idle(true);
    require(made(idle, 3000, 100, 190).us < 1.01 * least, "the first trials cost more than a hundredth");
    require(made(idle, 30000, 100, 190).us < 10 * 1.002 * least, "later trials cost more than two thousandths");
    // A machine that becomes busy is noticed at once, however long it was quiet.
    by_team(idle, 1000, 400, 190);
    require(by_team(idle, 1000, 400, 190) < 0.2, "a team that has become slower is noticed late");
    Size quiet(true);
    require(by_team(quiet, 20000, 100, 190) > 0.8, "a team that is nearly twice as fast is left");
    Size busy(true);
    by_team(busy, 2000, 400, 190);
    require(by_team(busy, 20000, 400, 190) < 0.2, "a team that is slower goes on");
    // What was found does not hold forever.
    by_team(busy, 20000, 100, 190);
    require(by_team(busy, 20000, 100, 190) > 0.8, "a team that has become faster is not tried again");
    by_team(busy, 20000, 400, 190);
    require(by_team(busy, 20000, 400, 190) < 0.2, "a team that has become slower goes on");
    // What was found in a moment's noise is soon found to be wrong.
    Size noisy(true);
    by_team(noisy, 600, 400, 190);
    require(by_team(noisy, 200, 400, 190) < 0.2, "noise is not noticed");
    require(by_team(noisy, 800, 100, 190) > 0.5, "one thread goes on long after the noise");
    // What was found long ago, with other calls or in another answer, is tried again at once.
    Size resumed(true);
    by_team(resumed, 30000, 400, 190);
    Clock::time += std::chrono::seconds(5);
    require(by_team(resumed, 200, 100, 190) > 0.7, "an old finding goes on after a pause");
    by_team(resumed, 30000, 400, 190);
    Clock::time += std::chrono::seconds(5);
    require(by_team(resumed, 300, 400, 190) < 0.2, "a slow team goes on after a pause");
    Size equal(true);
    require(by_team(equal, 20000, 190, 190) >= 0.0, "no answer");
    Size alone(false);
    require(by_team(alone, 100, 1, 100) == 0, "a team of one");
    // Silence between two answers is not slowness.
    Size patient(true);
    for (int answer = 0; answer < 300; ++answer) {
        Clock::time += std::chrono::seconds(5);
        by_team(patient, 200, 100, 190);
    }
    require(by_team(patient, 2000, 100, 190) > 0.7, "pauses between answers count as slowness");
    return 0;
}
