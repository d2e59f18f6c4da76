/* Standard normal draws of numpy's Philox generator, the same bits, drawn in bulk.

   numpy's ziggurat takes one random word per draw in 99 cases of 100: eight bits choose a layer,
   one the sign, 52 the place in the layer. Those cases are done here, from words made in bulk; the
   others are left to numpy's own function. The layers are learned from that function's answers
   (`learn`), so that no table of numpy's is copied here. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* As in <numpy/random/bitgen.h>, which needs Python's headers. */
typedef struct {
    void *state;
    uint64_t (*next_uint64)(void *state);
    uint32_t (*next_uint32)(void *state);
    double (*next_double)(void *state);
    uint64_t (*next_raw)(void *state);
} bitgen_t;

double random_standard_normal(bitgen_t *generator);

enum { LAYERS = 256, BLOCK = 4, WORDS = 1024, ROUNDS = 10 };

static const uint64_t PLACES = (UINT64_C(1) << 52) - 1;

/* State of numpy's Philox generator, in numpy's order. */
typedef struct {
    uint64_t counter[4], key[2], buffer[BLOCK], used;
} state_t;

typedef struct {
    state_t *state;
    uint64_t keys[ROUNDS][2];
    uint64_t words[WORDS];
    size_t next, filled;
} stream_t;

static double widths[LAYERS];    /* width of a place in a layer */
static uint64_t inside[LAYERS];  /* places below this are under the curve */

static void philox(const uint64_t counter[4], const uint64_t keys[ROUNDS][2], uint64_t out[BLOCK])
{
    uint64_t a = counter[0], b = counter[1], c = counter[2], d = counter[3];
    for (int round = 0; round < ROUNDS; round++) {
        unsigned __int128 p = (unsigned __int128)UINT64_C(0xD2E7470EE14C6C93) * a;
        unsigned __int128 q = (unsigned __int128)UINT64_C(0xCA5A826395121157) * c;
        uint64_t before_b = b, before_d = d;
        a = (uint64_t)(q >> 64) ^ before_b ^ keys[round][0];
        b = (uint64_t)q;
        c = (uint64_t)(p >> 64) ^ before_d ^ keys[round][1];
        d = (uint64_t)p;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* Start with the words that are left in numpy's buffer; round keys are made once. */
static void open_stream(stream_t *s, state_t *state)
{
    s->state = state;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        s->keys[round][0] = state->key[0] + round * UINT64_C(0x9E3779B97F4A7C15);
        s->keys[round][1] = state->key[1] + round * UINT64_C(0xBB67AE8584CAA73B);
    }
    s->next = 0;
    s->filled = BLOCK - state->used;
    memcpy(s->words, state->buffer + state->used, s->filled * sizeof(uint64_t));
}

static void fill(stream_t *s)
{
    uint64_t *counter = s->state->counter;
    for (size_t i = 0; i < WORDS; i += BLOCK) {
        /* A counter of 256 bits, lowest word first: a word that becomes 0 carries over. */
        for (int word = 0; word < 4 && ++counter[word] == 0; word++)
            ;
        philox(counter, s->keys, s->words + i);
    }
    s->next = 0;
    s->filled = WORDS;
}

/* Leave the state as if numpy had drawn: at the block of the last word that was used. Blocks made
   in advance are taken back from the counter. */
static void close_stream(stream_t *s)
{
    uint64_t *counter = s->state->counter;
    size_t left = s->filled - s->next;
    for (size_t blocks = left / BLOCK; blocks > 0; blocks--)
        for (int word = 0; word < 4 && counter[word]-- == 0; word++)
            ;
    philox(counter, s->keys, s->state->buffer);
    s->state->used = BLOCK - left % BLOCK;
}

static uint64_t next_word(void *stream)
{
    stream_t *s = stream;
    if (s->next == s->filled)
        fill(s);
    return s->words[s->next++];
}

static double next_double(void *stream)
{
    return (double)(next_word(stream) >> 11) * (1.0 / 9007199254740992.0);
}

/* Write `count` draws to `out`, or add them to it. */
static void draw(stream_t *s, bitgen_t *numpys, size_t count, bool add, double *out)
{
    size_t done = 0;
    while (done < count) {
        if (s->next == s->filled)
            fill(s);
        size_t left = s->filled - s->next, wanted = count - done, k = 0;
        const uint64_t *words = s->words + s->next;
        for (; k < left && k < wanted; k++) {
            uint64_t layer = words[k] & (LAYERS - 1), place = (words[k] >> 9) & PLACES;
            if (place >= inside[layer])
                break;
            double value = (double)(int64_t)place * widths[layer];
            uint64_t bits;
            memcpy(&bits, &value, sizeof bits);
            bits ^= (words[k] << 55) & (UINT64_C(1) << 63); /* bit 8 of the word is the sign */
            memcpy(&value, &bits, sizeof bits);
            out[done + k] = add ? out[done + k] + value : value;
        }
        s->next += k;
        done += k;
        if (k < left && done < count) {
            /* The word that was not accepted is still the next one: numpy's function takes it. */
            double value = random_standard_normal(numpys);
            out[done] = add ? out[done] + value : value;
            done++;
        }
    }
}

/* `count` sums of `terms` draws each: all first terms are drawn, then all second ones, ... */
void normals(state_t *state, size_t count, size_t terms, double *out)
{
    stream_t s;
    bitgen_t numpys = {&s, next_word, NULL, next_double, next_word};
    open_stream(&s, state);
    for (size_t term = 0; term < terms; term++)
        draw(&s, &numpys, count, term > 0, out);
    close_stream(&s);
}

/* A stream for learning the layers: it gives one word, then words that numpy's function accepts,
   and counts how often it was asked. */
typedef struct {
    uint64_t word;
    int asked;
} probe_t;

static uint64_t probe_word(void *probe)
{
    probe_t *p = probe;
    return p->asked++ ? UINT64_C(1) << 9 : p->word;
}

static double probe_double(void *probe)
{
    ((probe_t *)probe)->asked++;
    return 0.5;
}

/* Whether a place of a layer is accepted at once, from one word; and the draw it gives. */
static bool accepts(uint64_t layer, uint64_t place, double *value)
{
    probe_t probe = {place << 9 | layer, 0};
    bitgen_t generator = {&probe, probe_word, NULL, probe_double, probe_word};
    *value = random_standard_normal(&generator);
    return probe.asked == 1;
}

/* Learn the layers; call it once, before the first draw. The places of a layer that are accepted at
   once are those below a limit, which is found by bisection. */
void learn(void)
{
    for (uint64_t layer = 0; layer < LAYERS; layer++) {
        uint64_t low = 0, high = PLACES + 1;
        double value;
        while (low < high) {
            uint64_t middle = low + (high - low) / 2;
            if (accepts(layer, middle, &value))
                low = middle + 1;
            else
                high = middle;
        }
        inside[layer] = low;
        accepts(layer, 1, &widths[layer]); /* a draw is its place times the width */
        if (low <= 1) /* not accepted: no width was learned, and numpy draws from this layer */
            inside[layer] = 0;
    }
}
