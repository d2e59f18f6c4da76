/* Softmax of a few classes and the gradient of its cross-entropy, for all rows of a batch at once.

   It gives the same bytes as `by_arrays` in classes.py: an exponential of its own, made of sums and
   products with one rounding each, and sums over the classes in their order. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Below this, e^x is no longer a normal number, and is set to 0. */
static const float LEAST = -87.0f;

/* e^x of a number that is not positive: 2^n e^r with |r| <= ln(2) / 2, and a series for e^r.
   ln 2 is in two parts: n times the first is exact, so that r keeps its low bits. */
static inline float exponential(float x)
{
    float bounded = x >= LEAST ? x : LEAST;
    float n = rintf(bounded * 1.4426950408889634f);
    float r = bounded - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float series = 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    int32_t bits = ((int32_t)n + 127) * (1 << 23); /* 2^n: its biased exponent, no fraction */
    float power;
    memcpy(&power, &bits, sizeof power);
    return x >= LEAST ? series * power : x < LEAST ? 0 : x;
}

/* Batches of `rows` examples each: their targets and weights. A pass fills in, for each example,
   `sums` (over the classes, of exp(output - largest output)) and `below` (the target's output minus
   the largest output). */
typedef struct {
    const int64_t *targets;
    const float *weights;
    float *sums, *below;
    int rows;
} batches;

/* Gradients [count, rows, classes] of the weighted loss with respect to outputs, of `count` batches
   from number `first` on. The outputs of each are [rows, classes], and `stride` apart. */
void gradients(const batches *b, ptrdiff_t first, int count, int classes, const float *outputs,
               ptrdiff_t stride, float *gradients)
{
    const int rows = b->rows;
    const ptrdiff_t size = (ptrdiff_t)rows * classes;
    for (ptrdiff_t batch = first; batch < first + count; batch++) {
        const int64_t *targets = b->targets + batch * rows;
        for (int i = 0; i < rows; i++) {
            const float *row = outputs + (ptrdiff_t)i * classes;
            float *less = gradients + (ptrdiff_t)i * classes, largest = row[0];
            for (int k = 1; k < classes; k++)
                largest = row[k] > largest ? row[k] : largest;
            for (int k = 0; k < classes; k++)
                less[k] = row[k] - largest;
            b->below[batch * rows + i] = less[targets[i]];
        }
        /* One loop over the whole batch: a few classes alone would not fill a register. */
        for (ptrdiff_t j = 0; j < size; j++)
            gradients[j] = exponential(gradients[j]);
        for (int i = 0; i < rows; i++) {
            float *row = gradients + (ptrdiff_t)i * classes, sum = 0;
            float weight = b->weights[batch * rows + i];
            for (int k = 0; k < classes; k++)
                sum += row[k];
            for (int k = 0; k < classes; k++)
                row[k] = row[k] / sum;
            row[targets[i]] -= 1;
            for (int k = 0; k < classes; k++)
                row[k] *= weight;
            b->sums[batch * rows + i] = sum;
        }
        outputs += stride;
        gradients += size;
    }
}
