#include "cached_impl.h"

const AttendRows kAvx512Attend = attend_cached;
