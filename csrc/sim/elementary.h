// Logarithm, exponential and normal quantile of the simulator: the same bits on every platform,
// because they are sequences of IEEE 754 operations (docs/simulator.md section 4), not calls of
// libm.
#ifndef GYMFAST_SIM_ELEMENTARY_H_
#define GYMFAST_SIM_ELEMENTARY_H_

namespace gymfast::sim {

double log_of(double x);              // -inf at 0, NaN below
double exp_of(double x);              // inf above 709.79, 0 below -745.14
double normal_quantile_of(double p);  // NaN unless 0 < p < 1

}  // namespace gymfast::sim

#endif  // GYMFAST_SIM_ELEMENTARY_H_
