/* Gradients of a convolution that is max-pooled, from its windows' winners alone.

   Each number of a gradient is one sum that goes through its terms in one order, with one rounding
   for a product and its sum (built with -ffp-contract=fast, on processors that have it): which
   numbers share a register does not matter, nor how wide one is. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(__FMA__)
#error "a product and its sum must be one rounding"
#endif

#ifndef BYTES
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#endif

enum { LANES = BYTES / 4, WIDE = 12, NARROW = 3, WORD = 64 };

typedef float lanes_t __attribute__((vector_size(BYTES)));
typedef float unaligned_t __attribute__((vector_size(BYTES), aligned(4), may_alias));

/* Stretches of numbers that are added up: `count` times `factors[i]` what begins at `from[i]`. */
typedef struct {
    const float *numbers, *end;
    const int64_t *from;
    const float *factors;
    int64_t count;
} terms_t;

/* What is left before `end`, at most a register, and zeros. */
static lanes_t last(const float *x, const float *end)
{
    lanes_t lanes = {0};
    ptrdiff_t left = end - x;
    memcpy(&lanes, x, sizeof(float) * (size_t)(left < 0 ? 0 : left < LANES ? left : LANES));
    return lanes;
}

/* Sums of some registers of the terms, each as far from a term's beginning as `reach` says. */
static inline __attribute__((always_inline)) void add_some(
    const int registers, const terms_t *terms, const int64_t *reach, lanes_t *total)
{
    lanes_t sum[WIDE] = {0};
    const int64_t most = (terms->end - terms->numbers) - reach[registers - 1] - LANES;
    for (int64_t i = 0; i < terms->count; i++) {
        const float *x = terms->numbers + terms->from[i];
        const lanes_t factor = terms->factors[i] - (lanes_t){0};
        if (__builtin_expect(terms->from[i] <= most, 1)) {
#pragma GCC unroll 12
            for (int k = 0; k < registers; k++)
                sum[k] += factor * *(const unaligned_t *)(x + reach[k]);
        } else {
#pragma GCC unroll 12
            for (int k = 0; k < registers; k++)
                sum[k] += factor * last(x + reach[k], terms->end);
        }
    }
#pragma GCC unroll 12
    for (int k = 0; k < registers; k++)
        total[k] = sum[k];
}

static void add_up(const terms_t *terms, const int64_t *reach, int64_t registers, lanes_t *total)
{
    int64_t k = 0;
    for (; registers - k >= WIDE; k += WIDE)
        add_some(WIDE, terms, reach + k, total + k);
    for (; registers - k >= NARROW; k += NARROW)
        add_some(NARROW, terms, reach + k, total + k);
    for (; k < registers; k++)
        add_some(1, terms, reach + k, total + k);
}

/* Where the registers of `rows` rows of `length` numbers are, `step` from one row to the next. */
static int64_t reached(int64_t rows, int64_t length, int64_t step, int64_t *reach)
{
    int64_t registers = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t start = 0; start < length; start += LANES)
            reach[registers++] = row * step + start;
    return registers;
}

/* Gradient of the weights, `[outputs][rows][length]`.

   Scratch: `reach` and, on cache lines, `total` have room for each register of a patch, `from` and
   `factors` for a number a window and channel, `counts` for one a channel. */
void weight_gradient(const float *x, int64_t images, int64_t image, const float *delta,
                     const int64_t *places, int64_t windows, int64_t outputs,
                     const int64_t *offsets, int64_t rows, int64_t length, int64_t step,
                     int64_t *reach, float *total, int64_t *from, float *factors, int64_t *counts,
                     float *gradient)
{
    const int64_t most = images * windows, registers = reached(rows, length, step, reach);
    const int64_t whole = registers / rows * LANES;
    memset(counts, 0, sizeof(int64_t) * (size_t)outputs);
    for (int64_t n = 0; n < images; n++)
        for (int64_t q = 0; q < windows; q++, delta += outputs, places += outputs)
            for (int64_t o = 0; o < outputs; o++) {
                const int64_t next = o * most + counts[o];
                from[next] = n * image + offsets[places[o]];
                factors[next] = delta[o];
                counts[o] += delta[o] != 0.0f;
            }
    for (int64_t o = 0; o < outputs; o++) {
        const terms_t terms = {x, x + images * image, from + o * most, factors + o * most,
                               counts[o]};
        add_up(&terms, reach, registers, (lanes_t *)total);
        for (int64_t row = 0; row < rows; row++, gradient += length)
            memcpy(gradient, total + row * whole, sizeof(float) * (size_t)length);
    }
}

/* Gradient of the images, which is zero to begin with.

   Scratch: `reach` and `total` as above; `dense` a number and `won` a bit for each place and
   channel, the bits of a place in words of their own; `from` and `factors` one a channel. */
void input_gradient(const float *weights, const float *delta, const int64_t *places,
                    int64_t images, int64_t image, int64_t windows, int64_t outputs,
                    const int64_t *offsets, int64_t positions, int64_t rows, int64_t length,
                    int64_t step, int64_t *reach, float *total, float *dense, uint64_t *won,
                    int64_t *from, float *factors, float *gradient)
{
    const int64_t registers = reached(rows, length, length, reach);
    const int64_t whole = registers / rows * LANES, words = (outputs + WORD - 1) / WORD;
    const int64_t weight = rows * length;
    for (int64_t n = 0; n < images; n++, gradient += image) {
        memset(dense, 0, sizeof(float) * (size_t)(positions * outputs));
        memset(won, 0, sizeof(uint64_t) * (size_t)(positions * words));
        for (int64_t q = 0; q < windows; q++, delta += outputs, places += outputs)
            for (int64_t o = 0; o < outputs; o++) {
                dense[places[o] * outputs + o] += delta[o];
                won[places[o] * words + o / WORD] |= UINT64_C(1) << (o % WORD);
            }
        for (int64_t p = 0; p < positions; p++) {
            terms_t terms = {weights, weights + outputs * weight, from, factors, 0};
            for (int64_t word = 0; word < words; word++)
                for (uint64_t bits = won[p * words + word]; bits; bits &= bits - 1) {
                    const int64_t o = word * WORD + __builtin_ctzll(bits);
                    from[terms.count] = o * weight;
                    factors[terms.count] = dense[p * outputs + o];
                    terms.count += factors[terms.count] != 0.0f;
                }
            if (terms.count == 0)
                continue;
            add_up(&terms, reach, registers, (lanes_t *)total);
            for (int64_t row = 0; row < rows; row++) {
                float *into = gradient + offsets[p] + row * step;
                for (int64_t i = 0; i < length; i++)
                    into[i] += total[row * whole + i];
            }
        }
    }
}
