"""Limits: how far the guard looks, how much it keeps and how long it takes, each with its reason.

What is beyond a limit is said by name, or left as it is. Facts of hardware and libraries are no limits: they stand with
the rules that they belong to.
"""

from __future__ import annotations

# --- What a user may give: anything beyond it is a mistake -------------------------------------------------

#: Samples, and sizes of a dimension: torch's own arithmetic of shapes in int64 stays exact up to here.
LARGEST_BATCH = 2**31 - 1
#: Bytes: no device counts beyond a signed 64-bit integer, and neither does torch.
LARGEST_BYTES = 2**63 - 1
#: Bytes: no card and no technique has to do with so few, so that a smaller plain number is meant in another unit.
LEAST_WRITTEN = 2**20
#: Bytes: a smaller budget in a training's settings is no number of bytes.
LEAST_BUDGET = 2**10
#: Dimensions of one sample: videos in batches of clips have six.
MOST_DIMENSIONS = 8
#: Ranks: the largest training of one job that anybody has published used 100,000 GPUs.
MOST_GPUS = 2**17
#: Layers: the deepest published networks have about a thousand (He et al. 2016, "Identity Mappings").
MOST_LAYERS = 10_000
#: Characters of a name: longer ones are pasted files.
LONGEST_NAME = 1000

# --- Files and texts ---------------------------------------------------------------------------------------

#: Bytes of a memory snapshot: 200,000 entries with their stack frames take a tenth of it.
LARGEST_SNAPSHOT = 2 * 2**30
#: Bytes of a config: no person writes more.
LARGEST_CONFIG = 2**20
#: Nodes of a config with every alias written out: real ones have hundreds.
CONFIG_NODES = 100_000
#: Bytes of an index of weights, which names every tensor: large ones have some MB.
LARGEST_LISTING = 64 * 2**20
#: Files of one kind in the cache folder, the oldest go first: nobody trains more models at a time.
FILES_KEPT = 64

# --- Words of reports --------------------------------------------------------------------------------------

#: Names, notes or categories in a sentence or a short report: more are not read there; the others are counted.
NAMED = 3
#: Rows of each list of a report: as text, with which it still fits on a screen, and on a page.
LISTED_ON_SCREEN = 6
LISTED_ON_PAGE = 20

# --- What stands for the whole -----------------------------------------------------------------------------

#: Batches that a loop of the user's may take before its first training step has ended, each with none: another loop
#: would never end in a trace.
BATCHES_WITHOUT_A_STEP = 20

#: Batches, micro-batches or slices of a loop that are followed: a first one makes what the further ones find.
ROUNDS_FOLLOWED = 2
#: Answers of torch about layouts that are kept in a process: a plan of a large model asks for some thousands.
RESULTS_KEPT = 50_000
#: Optimizer steps after which a training is in its stride: what the first two set up is there by then.
FIRST_STEPS = 3
#: Epochs that are followed or drawn: one that begins, one between, one that ends.
EPOCHS_FOLLOWED = 3
#: Samples that are read where all look alike, and where they differ: each costs the user's own code.
SAMPLES_ALIKE = 2
SAMPLES_READ = 64
#: Samples of the largest batch in which a repeated one has memory of its own, by which it is told from the first.
LARGEST_APART = 16
#: Samples whose sizes are kept: of more, the smallest and largest of each measure (so many), and some from all over.
SIZES_KEPT = 2048
EXTREMES_KEPT = 32
#: Parts of a sample's list that are looked at one by one: of a longer one the first stands for all.
PARTS_OF_A_SAMPLE = 8
#: Samples that are asked for their sizes one by one: a million takes a part of the time limit.
SAMPLES_ASKED = 1_000_000
#: Samples, spread over the data set, that have to bear out what it says of their sizes.
SAMPLES_CHECKED = 6
#: Share of the samples after which those that were all alike are believed to be so.
SHARE_FOR_ALIKE = 0.05
#: Shares of the time limit for sizes and for drawing from the sampler; the rest is for reading the chosen samples.
SHARE_FOR_SIZES = 0.6
SHARE_FOR_BATCHES = 0.15
#: Batches that are compared by tracing, each of which takes seconds.
BATCHES_COMPARED = 6
#: Steps at the beginning of an epoch that are looked at one by one: conditions on the step's number show there.
STEPS_ONE_BY_ONE = 64
#: Batches that a loop may load ahead of its steps.
BATCHES_AHEAD = 64
#: Begins of epochs and iterations named by hooks that are looked at; beyond, trainings repeat themselves.
PLACES_LOOKED_AT = 1000
#: Different steps besides the first and the last that are followed, each of which is a trace.
LATER_STEPS = 8
#: Allocations among which the gradient of ones is looked for: a GradScaler makes its own two numbers first.
FIRST_ALLOCATIONS = 4
#: Rounds of a loop on the simulated device that leave the same memory, and of one that takes more and more.
EQUAL_ROUNDS = 8
GROWING_ROUNDS = 1000
#: Events of untraced rounds that are written down with their temporaries; beyond, what the rounds leave behind.
EVENTS_WRITTEN = 20_000

# --- How far code and objects are looked into --------------------------------------------------------------

#: Objects that a training's functions and modules lead to, the nearest first: a look at one takes a microsecond or two,
#: and a walk before every batch stays below the time of a short step.
OBJECTS_REACHED = 5000
#: Items of a container whose items are looked into; what a longer one holds itself is remembered all the same.
ITEMS_REACHED = 10_000
#: Bytes of a NumPy array that is copied before every batch: a tenth of a millisecond.
ARRAY_REACHED = 2**20
#: Bytes of a buffer that is copied before every batch where it is, a microsecond on a GPU; of a larger one there is a
#: copy on the host, made anew only when the buffer has changed.
COPIED_IN_PLACE = 2**20
#: Items of a container: longer ones hold data, not switches.
LONGEST_SWITCHES = 64

# --- Values that are computed or compared ------------------------------------------------------------------

#: Elements of a tensor that is computed for real on the simulated device: larger ones cost memory and time.
LARGEST_COMPUTED = 2**20
#: Bytes of a stand-in that is computed for real, for the same reason.
LARGEST_STAND_IN = 64 * 2**20
#: Elements whose values are told apart: labels and masks of long texts differ in fewer.
VALUES_COMPARED = 4096
#: Values of each saved tensor that two forwards are compared by: 1 KiB of float32.
VALUES_OF_A_TENSOR = 256
#: Steps of the optimizer on stand-ins: the second reads the states that the first has made.
SMALL_STEPS = 3
#: Elements of a weight's stand-in: more than the 4,096 from which on libraries keep states in 8 bits or move a weight.
STAND_IN_ELEMENTS = 8192
#: Stand-ins for the weights of a group, for each number of dimensions, on which some optimizers decide.
STAND_INS = 2

# --- What is tried -----------------------------------------------------------------------------------------

#: Batch sizes: what is still below a card there never reaches it in practice.
LARGEST_BATCH_ASKED = 2**16
#: Families of plans that are looked into for a way beside the one that is taken.
MOST_NEIGHBOURS = 4
#: Frozen modules that are moved to the host one after the other; more only all together.
MOST_FROZEN = 4
#: Slices of a body's batch: a trace follows each of them.
MOST_SLICES = 8
#: Bodies of a model that are followed, each in two runs of the step.
MOST_CANDIDATES = 3
#: Batch sizes of an evaluation.
EVALUATIONS_TRIED = 8
#: Timelines that are kept where a law does not hold: a plan asks for a handful of sizes many times.
TRACES_KEPT = 16

# --- Seconds -----------------------------------------------------------------------------------------------

#: A copy of the process, whatever it does.
COPY_SECONDS = 1800.0
#: A copy that follows two optimizer steps.
TRACE_SECONDS = 300.0
#: Beyond its own limit, until a copy that does not answer is given up.
ANSWER_SECONDS = 10.0
#: A copy's end, once it has answered or its connection has closed.
END_SECONDS = 5.0
#: Without a message and without work of its processor, after which a copy hangs: a sample from slow storage takes less,
#: and a copy inherits locks of other threads, for which it may wait for ever.
IDLE_SECONDS = 120.0
#: Between two looks at a copy's processor time; and for a hanging copy to write down where it hangs.
LOOK_SECONDS = 1.0
ABORT_SECONDS = 2.0
#: Between two looks at what ranks have stored, at first and at most.
LOOK_AT_FIRST = 0.005
LOOK_AT_MOST = 0.5
#: Of processor time of a trace, from which another is made in a copy: copying ViT-L and sending its answer took 0.5.
COPY_WORTH_SECONDS = 2.0
#: Of processor time for the compiler where ``compile_seconds`` does not say: GPT-2 small, ViT-B/16, ResNet-50 and a
#: U-Net as whole models take 40 to 170 on two cores.
COMPILE_SECONDS = 300.0
#: Of processor time for what a script does after its first steps, and by the clock: what was seen is the answer.
JOB_SECONDS = 60
JOB_WALL_SECONDS = 100
#: Of processor time for hooks of later epochs and iterations; more where the first steps took longer to follow.
LATER_SECONDS = 2.0

# --- Copies of the process ---------------------------------------------------------------------------------

#: Bytes of shared memory that are made private; larger areas are data sets, which are read.
SHARED_MEMORY_COPIED = 512 * 2**20
#: Bytes of a file that is read and written, of which the copy gets one of its own; a larger one it only reads.
LARGEST_FILE_COPIED = 64 * 2**20
#: Share of the host's free memory that values of the device may take there.
SHARE_OF_FREE_MEMORY = 0.5
#: Programs of a script that may read their standard input, and find its end.
ENDS_OF_INPUT = 1000
