#include "cached_impl.h"

const AttendRows kAvx2Attend = attend_cached;
