// Includes every primitive that losses are composed of.
#pragma once
#include "primitives/boxes.cuh"
#include "primitives/divergence.cuh"
#include "primitives/focal.cuh"
#include "primitives/likelihood.cuh"
#include "primitives/logistic.cuh"
#include "primitives/math.cuh"
#include "primitives/robust.cuh"
#include "primitives/vectors.cuh"
